"""A caller's logits processors are merged and ordered as in transformers, and folded into parameters only if that gives
the same logits.

The expected logits are those of the processors that transformers' `generate` runs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.processors import absorb_processors, run_processors
from selfspec.request import read_settings
from selfspec.sampling import SamplingParams, process_logits, warp_logits
from tests.tiny import tiny_model

SIZE = 12  # tokens
WIDTH = 3  # of the prompt
ENDS = [2, 7]


class Opaque(LogitsProcessor):
    """Changes a logit depending on all logits and on the length of the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.log_softmax(-1) * (1 + input_ids.shape[1] % 2)


class OwnPenalty(RepetitionPenaltyLogitsProcessor):
    """A subclass of a known type."""


PROCESSORS: list[Any] = [
    lambda: Opaque(),
    lambda: OwnPenalty(1.4),
    lambda: RepetitionPenaltyLogitsProcessor(1.7),
    lambda: RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=2),
    lambda: SequenceBiasLogitsProcessor({(3,): -1.5, (5,): 2.25}),
    lambda: SequenceBiasLogitsProcessor({(3,): -1.5, (1, 5): 4.5, (4, 1, 6): -3.0}),
    lambda: NoBadWordsLogitsProcessor([[1], [7], [4, 5]], eos_token_id=ENDS),
    lambda: SuppressTokensLogitsProcessor([6, 2, 500]),
    lambda: MinLengthLogitsProcessor(6, ENDS),
    lambda: MinLengthLogitsProcessor(6, [9]),
    lambda: MinNewTokensLengthLogitsProcessor(WIDTH, 2, ENDS),
    lambda: TemperatureLogitsWarper(0.5),
    lambda: TopKLogitsWarper(4),
    lambda: TopPLogitsWarper(0.8),
    lambda: TopPLogitsWarper(0.3, min_tokens_to_keep=3),
    lambda: MinPLogitsWarper(0.2),
]
SETTINGS: dict[str, list[Any]] = {
    "repetition_penalty": [1.3, 0.5],
    "min_length": [5],
    "min_new_tokens": [0, 3],
    "bad_words_ids": [[[8], [2]], [[8], [3, 4]], [[1, 3]]],
    "suppress_tokens": [[9, 10]],
    "sequence_bias": [{(0,): 3.5}, {(0,): 3.5, (1, 3): -2.5}],
    "temperature": [0.25, 1.0],
    "top_k": [0, 3, 6],
    "top_p": [0.9],
    "min_p": [0.1],
}


@cache
def model() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=2)


def by_transformers(
    kwargs: dict[str, Any], own: list[LogitsProcessor], text: list[int], logits: torch.Tensor
) -> torch.Tensor:
    config = GenerationConfig()
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    config.update(**kwargs)
    config._eos_token_tensor = torch.tensor(ENDS)
    if config.min_new_tokens is not None:
        config.min_length = WIDTH + config.min_new_tokens
    every = model()._get_logits_processor(
        config, input_ids_seq_length=WIDTH, logits_processor=LogitsProcessorList(own), device="cpu"
    )
    return every(torch.tensor([text]), logits)


def by_selfspec(
    kwargs: dict[str, Any], own: list[LogitsProcessor], text: list[int], logits: torch.Tensor
) -> torch.Tensor:
    request = read_settings(GenerationConfig(), None, {**kwargs, "eos_token_id": ENDS}).resolve(WIDTH, own)
    values = process_logits(logits, [request.params], [text], [WIDTH])
    values = run_processors(request.processors, torch.tensor([text]), values)
    return warp_logits(values, [request.params])


@settings(max_examples=250)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")
def test_any_processors_and_settings_give_transformers_logits(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(SETTINGS)), unique=True, max_size=4))
    kwargs = {name: data.draw(st.sampled_from(SETTINGS[name])) for name in names}
    kwargs["do_sample"] = data.draw(st.booleans())
    makers = data.draw(st.lists(st.sampled_from(PROCESSORS), max_size=4))
    text = data.draw(st.lists(st.sampled_from([1, 3, 4, 5, 7]), min_size=WIDTH, max_size=WIDTH + 4))
    logits = torch.tensor([data.draw(st.permutations([0.37 * n - 1.9 for n in range(SIZE)]))], dtype=torch.float64)
    theirs = by_transformers(kwargs, [make() for make in makers], text, logits)
    ours = by_selfspec(kwargs, [make() for make in makers], text, logits)
    if kwargs["do_sample"]:
        assert (ours > -math.inf).tolist() == (theirs > -math.inf).tolist()
        torch.testing.assert_close(ours, theirs)
    else:  # greedy decoding drops warpers, which keep the best token
        assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()


def test_processors_of_known_types_become_parameters() -> None:
    own = [
        SequenceBiasLogitsProcessor({(3,): -1.5}),
        RepetitionPenaltyLogitsProcessor(1.7),
        NoBadWordsLogitsProcessor([[4], [2]], eos_token_id=[2]),
        MinLengthLogitsProcessor(6, [2]),
        MinNewTokensLengthLogitsProcessor(3, 2, torch.tensor([2])),
        SuppressTokensLogitsProcessor([6]),
        TemperatureLogitsWarper(0.5),
        TopKLogitsWarper(4),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.2),
    ]
    params = SamplingParams(do_sample=True, top_k=50, logit_bias=((3, 1),), min_length=5, stop_token_ids=(2,))
    folded, left = absorb_processors(params, own, prompt_length=3)
    assert not left
    assert folded == SamplingParams(
        do_sample=True,
        temperature=0.5,
        top_k=4,
        top_p=0.8,
        min_p=0.2,
        repetition_penalty=1.7,
        logit_bias=((3, -0.5),),
        banned_token_ids=(4, 6),
        min_new_tokens=3,
        stop_token_ids=(2,),
    )


ORDERS: dict[str, tuple[list[Any], list[type]]] = {
    "temperature-before-penalty": (
        [TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(1.7)],
        [TemperatureLogitsWarper, RepetitionPenaltyLogitsProcessor],
    ),
    "ban-after-temperature": ([TemperatureLogitsWarper(0.5), SuppressTokensLogitsProcessor([1])], []),
    "ban-after-top-p": (
        [TopPLogitsWarper(0.5), SuppressTokensLogitsProcessor([1])],
        [TopPLogitsWarper, SuppressTokensLogitsProcessor],
    ),
    "bias-after-penalty": (
        [RepetitionPenaltyLogitsProcessor(1.7), SequenceBiasLogitsProcessor({(1,): 2.0})],
        [SequenceBiasLogitsProcessor],
    ),
    "between-unknown-ones": (
        [Opaque(), TopKLogitsWarper(3), Opaque(), SuppressTokensLogitsProcessor([1])],
        [Opaque, TopKLogitsWarper, Opaque, SuppressTokensLogitsProcessor],
    ),
    "around-an-unknown-one": ([SuppressTokensLogitsProcessor([1]), Opaque(), TopKLogitsWarper(3)], [Opaque]),
    "a-top-k-that-removes-no-token": ([TopKLogitsWarper(4, filter_value=-30.0)], [TopKLogitsWarper]),
    "a-subclass": ([OwnPenalty(1.2)], [OwnPenalty]),
    "longer-bad-words": ([NoBadWordsLogitsProcessor([[1], [3, 4]])], [NoBadWordsLogitsProcessor]),
}


@pytest.mark.parametrize(("own", "left"), ORDERS.values(), ids=ORDERS.keys())
def test_processors_whose_order_matters_are_not_folded(own: list[Any], left: list[type]) -> None:
    _, rest = absorb_processors(SamplingParams(do_sample=True), own, prompt_length=3)
    assert [type(processor) for processor in rest] == left


@pytest.mark.parametrize(
    ("own", "processor", "folded"),
    [
        ({"min_p": 0.1}, MinPLogitsWarper(0.3), {"min_p": 0.3}),
        ({"min_p": 0.3}, MinPLogitsWarper(0.1), {"min_p": 0.3}),
        ({"top_k": 3}, TopKLogitsWarper(5), {"top_k": 3}),
        ({"top_k": 5}, TopKLogitsWarper(3), {"top_k": 3}),
        ({"top_p": 0.9}, TopPLogitsWarper(0.8), None),
        ({"temperature": 0.5}, TemperatureLogitsWarper(0.8), None),
    ],
)
def test_two_warpers_of_a_type_fold_into_one_that_keeps_the_same_tokens(
    own: dict[str, float], processor: Any, folded: dict[str, float] | None
) -> None:
    params = SamplingParams(do_sample=True, **own)  # type: ignore[arg-type]
    expected = SamplingParams(do_sample=True, **(folded or own))  # type: ignore[arg-type]
    assert absorb_processors(params, [processor], 3) == (expected, [] if folded else [processor])


def test_run_processors_keeps_the_dtype_of_the_logits() -> None:
    halves = [lambda tokens, scores: scores.half(), lambda tokens, scores: (scores + 1).bfloat16()]
    out = run_processors(halves, torch.tensor([[1]]), torch.tensor([[0.5, 2.0]]))
    assert out.dtype == torch.float32 and out.tolist() == [[1.5, 3.0]]


@pytest.mark.parametrize("returned", [None, torch.zeros(1, 4)], ids=["None", "another shape"])
def test_a_processor_that_returns_no_logits_is_named(returned: Any) -> None:
    def broken(tokens: torch.Tensor, scores: torch.Tensor) -> Any:
        return returned

    with pytest.raises(ValueError, match="logits processor broken returned"):
        run_processors([broken], torch.tensor([[1]]), torch.zeros(1, 5))
