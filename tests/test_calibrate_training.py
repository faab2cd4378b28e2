"""Training exits: the loss against torch's, the optimizer, checkpoints, and that the model's weights do not change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from selfspec.calibrate.corpus import Corpus, hidden_states, text_features
from selfspec.calibrate.drafting import draft_head_inputs
from selfspec.calibrate.optimizer import Optimizer, orthogonalised
from selfspec.calibrate.training import HeadLoss, Recipe, Student, Trainer, _Places, fused_head_loss, head_loss
from selfspec.calibrate.writing import Template, Writer
from selfspec.engine import Engine
from selfspec.models.decoder import Decoder
from selfspec.models.linear import expand
from selfspec.models.loading import adopt
from selfspec.models.quantized.rounding import quantize
from selfspec.models.quantized.tensor import pack
from selfspec.profiles.exits_file import exit_tensors
from selfspec.speculation.exit import Exit
from tests.calibrated import random_documents
from tests.scripted import endless, random_prompt
from tests.tiny import FAMILIES, VOCABULARY, tiny_model

RECIPE = Recipe(length=32, rows=4, roots=8, warmup=5, learning_rate=4e-3)
EVERY_ROW = torch.arange(VOCABULARY)


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@cache
def text(family: str) -> tuple[Decoder, Corpus, torch.Tensor]:
    """A model, text that it wrote, and the features of that text."""
    engine = Engine.from_model(endless(tiny_model(family, dtype=torch.float32)))
    prompts = [random_prompt(6, seed) for seed in range(8)]
    corpus, model = Writer(engine, Template((), ())).answers(prompts, 0.7, 26, seed=0), engine.model
    return model, corpus, text_features(model, corpus, 3, torch.device("cpu"))


def trainer(family: str = "llama", layer: int = 2, steps: int = 12, **changes: object) -> Trainer:
    model, corpus, features = text(family)
    return Trainer(model, layer, corpus, features, EVERY_ROW, replace(RECIPE, **changes), steps)


def tensors_of(model: Decoder) -> list[torch.Tensor]:
    of_layers = [tensor for layer in model.layers for tensor in layer.tensors().values()]
    return [model.embedding.weight, model.norm, model.head.weight, *of_layers]


def same(exit: Exit, other: Exit) -> bool:
    return all(torch.equal(tensor, exit_tensors(other)[name]) for name, tensor in exit_tensors(exit).items())


# The loss


@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "soft cap"])
def test_the_heads_loss_is_torchs_cross_entropy(cap: float | None) -> None:
    """Value and gradient, over some rows of the head; logits are float32, hence the tolerance."""
    generator = torch.Generator().manual_seed(0)
    head = adopt(tiny_model("llama")).head.weight[:50]
    head_input = torch.randn(20, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    goal = 2 * torch.randn(20, 50, generator=generator, dtype=torch.float64)
    loss, right = HeadLoss.apply(head_input, goal, head, cap)
    (gradient,) = torch.autograd.grad(3 * loss, head_input)

    logits = head_input @ head.T
    logits, target = (x if cap is None else cap * torch.tanh(x / cap) for x in (logits, goal))
    expected = F.cross_entropy(logits, target.softmax(-1))
    (expected_gradient,) = torch.autograd.grad(3 * expected, head_input)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert right == (logits.argmax(-1) == target.argmax(-1)).float().mean()


@on_gpu
@pytest.mark.parametrize("cap", [None, 30.0], ids=["plain", "soft cap"])
def test_the_compiled_loss_is_the_heads_loss(cap: float | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    logits, goal = 8 * torch.randn(2, 64, 5000, generator=generator, device="cuda", dtype=torch.bfloat16)
    loss, right, gradient = fused_head_loss()(logits, goal, cap)
    expected_loss, expected_right, expected_gradient = head_loss(logits, goal, cap)
    torch.testing.assert_close(loss, expected_loss)
    assert right == expected_right
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-2, atol=1e-7)


def test_exits_are_trained_to_the_states_that_the_head_reads_of_the_model() -> None:
    one = trainer()
    one._load_batch()
    with torch.no_grad():
        head_inputs = one.model.head_input(list(hidden_states(one.model, one._batch))[-1])
    for depth in range(RECIPE.depths):
        at = (one._roots + depth)[..., None].expand(-1, -1, head_inputs.shape[-1])
        torch.testing.assert_close(one._wanted(depth), head_inputs.gather(1, at).flatten(0, 1))


def test_the_loss_is_the_weighted_sum_over_depths() -> None:
    one = trainer(error_weight=0.3)
    one._load_batch()
    total = one._loss()
    exit, below, expected = one.exit(), list(hidden_states(one.model, one._batch)), torch.zeros(())
    head_inputs = draft_head_inputs(exit, below[exit.layer], one._features, one._batch, one._roots, RECIPE.depths)
    for depth, head_input in enumerate(head_inputs):
        wanted = one._wanted(depth)
        target = one.model.project(wanted, one.model.head).softmax(-1)
        entropy = F.cross_entropy(exit.logits(head_input).flatten(0, 1), target)
        torch.testing.assert_close(one.seen[0, depth], entropy)
        error = F.mse_loss(head_input.flatten(0, 1), wanted) / wanted.square().mean()
        expected += RECIPE.depth_weights[depth] * (entropy + 0.3 * error)
    torch.testing.assert_close(total.detach(), expected)


def test_roots_are_positions_after_which_the_model_chose_a_whole_draft() -> None:
    corpus = Corpus.pack([*random_documents(20, 11, 7, written=4), *random_documents(18, written=1)], 40)
    places, depths = _Places(corpus, 3), 3
    drawn = places.some(np.random.default_rng(0), np.arange(len(corpus)), 500)
    for row, of_row in enumerate(drawn):
        allowed = {
            place
            for place in range(corpus.length - depths)
            if all(bool(corpus.predicts[row, place + depth]) for depth in range(depths))
        }
        assert set(of_row.tolist()) == allowed
        for place in allowed:
            assert len(set(corpus.documents[row, place : place + depths + 1].tolist())) == 1


def test_a_text_too_short_to_draft_in_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        _Places(Corpus.pack(random_documents(5, written=3), 8), 3)


# The optimizer


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6), (1, 5)], ids=str)
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1.0, 50.0], dtype=torch.float64)[:, None, None]
    matrices = sizes * torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    found = orthogonalised(matrices)
    assert found.shape == matrices.shape and found.dtype == matrices.dtype
    for before, after in zip(matrices, found, strict=True):
        u, values, v = torch.linalg.svd(before, full_matrices=False)
        inside = u.T @ after @ v.T  # diagonal, in the same basis
        assert torch.allclose(inside, inside.diag().diag(), atol=1e-6)
        kept = inside.diag()[values > 0.05 * values[0]]
        assert ((kept > 0.6) & (kept < 1.3)).all()


def test_a_matrix_step_moves_along_the_orthogonalised_momentum() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(6, 4, generator=generator), torch.randn(3, 6, 4, generator=generator)
    optimizer = Optimizer({"w": start.clone()})
    optimizer.learning_rate.fill_(0.01)
    expected, momentum = start.clone(), torch.zeros(6, 4)
    for gradient in gradients:
        optimizer.step({"w": gradient})
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalised((0.05 * gradient + 0.95 * momentum)[None])[0]
        expected = expected * (1 - 0.01 * 0.01) - 0.01 * 0.2 * 6**0.5 * update
    torch.testing.assert_close(optimizer.parameters["w"], expected)


def test_a_vector_step_is_adams() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(7, generator=generator), torch.randn(4, 7, generator=generator)
    optimizer = Optimizer({"b": start.clone()})
    optimizer.learning_rate.fill_(0.01)
    theirs = start.clone().requires_grad_()
    adam = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.98), eps=1e-8)
    for gradient in gradients:
        optimizer.step({"b": gradient})
        theirs.grad = gradient
        adam.step()
    torch.testing.assert_close(optimizer.parameters["b"], theirs.detach())


def test_matrices_of_one_shape_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(2, 5, 5, generator=generator), torch.randn(2, 5, 5, generator=generator)
    both = Optimizer({"a": start[0].clone(), "b": start[1].clone()})
    alone = Optimizer({"b": start[1].clone()})
    for optimizer in (both, alone):
        optimizer.learning_rate.fill_(0.1)
    both.step({"a": gradients[0], "b": gradients[1]})
    alone.step({"b": gradients[1]})
    torch.testing.assert_close(both.parameters["b"], alone.parameters["b"])


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    rates = [RECIPE.rate_at(step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(RECIPE.learning_rate / RECIPE.warmup)
    assert max(rates) == rates[RECIPE.warmup - 1]
    assert all(later < earlier for earlier, later in zip(rates[4:], rates[5:], strict=False))
    assert rates[100] == pytest.approx(0)


# Students


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_exit_computes_the_models_next_layer(family: str) -> None:
    model, corpus, features = text(family)
    states = list(hidden_states(model, corpus))
    exit = Student(model, 2).exit()
    roots = torch.arange(5, 12).expand(len(corpus), -1)
    (head_input,) = draft_head_inputs(exit, states[2], features, corpus, roots, 1)
    expected = model.normalise(states[3], model.norm).gather(1, roots[..., None].expand(-1, -1, 32))
    torch.testing.assert_close(head_input.detach(), expected)


# Training


@pytest.mark.parametrize("family", FAMILIES)
def test_training_changes_every_tensor_of_the_exit_and_none_of_the_model(family: str) -> None:
    one = trainer(family, layer=1, steps=4)
    model = one.model
    before = [tensor.clone() for tensor in tensors_of(model)]
    untrained = exit_tensors(one.exit())
    for _ in range(4):
        one.train_step()
    assert all(torch.equal(old, new) for old, new in zip(before, tensors_of(model), strict=True))
    assert not any(tensor.requires_grad for tensor in tensors_of(model))
    trained = exit_tensors(one.exit())
    assert [name for name, tensor in trained.items() if torch.equal(tensor, untrained[name])] == []
    assert not any(tensor.requires_grad for tensor in trained.values())


def test_a_step_with_infinite_gradients_changes_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(steps=4)
    loss_of = HeadLoss.apply
    one.train_step()

    def overflows(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss, right = loss_of(*arguments)
        return loss * torch.tensor(torch.inf), right

    monkeypatch.setattr(HeadLoss, "apply", overflows)
    before = exit_tensors(one.exit())
    one.train_step()
    monkeypatch.undo()
    assert int(one.left_out) == 1 and "1 steps with infinite gradients" in one.note()
    assert all(torch.equal(tensor, before[name]) for name, tensor in exit_tensors(one.exit()).items())
    for _ in range(2):
        one.train_step()
    after = exit_tensors(one.exit())
    assert int(one.left_out) == 1 and all(tensor.isfinite().all() for tensor in after.values())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_the_loss_falls_at_every_depth() -> None:
    one = trainer(steps=60)
    losses = []
    for _ in range(60):
        one.train_step()
        losses.append(one.seen[0].clone())
    assert (torch.stack(losses[-8:]).mean(0) < 0.85 * torch.stack(losses[:8]).mean(0)).all()


def test_training_from_a_checkpoint_gives_the_same_exit() -> None:
    whole = trainer()
    state = {}
    for step in range(12):
        if step == 5:
            state = {name: tensor.clone() for name, tensor in whole.state().items()}
        whole.train_step()
    resumed = trainer()
    resumed.restore(state)
    assert resumed.step == 5
    while resumed.step < 12:
        resumed.train_step()
    assert same(whole.exit(), resumed.exit())
    assert resumed.note() == whole.note()
    other = trainer(seed=1)
    while other.step < 12:
        other.train_step()
    assert not same(whole.exit(), other.exit()), "another seed draws other rows and roots"


def test_timing_training_steps_changes_nothing() -> None:
    timed, plain = trainer(), trainer()
    assert 0 < timed.seconds_per_step() < 10
    assert timed.step == 0 and same(timed.exit(), plain.exit())
    for one in (timed, plain):
        for _ in range(3):
            one.train_step()
    assert same(timed.exit(), plain.exit())


def test_a_restored_checkpoint_reports_the_loss_of_its_last_step() -> None:
    trained, restored = trainer(), trainer()
    for _ in range(3):
        trained.train_step()
    restored.restore(trained.state())
    assert restored.note() == trained.note()
    assert "loss 0.000" not in restored.note()


def test_training_does_not_change_its_text() -> None:
    model, corpus, features = text("llama")
    kept = {name: tensor.clone() for name, tensor in vars(corpus).items()}
    features_before = features.clone()
    one = trainer(steps=3)
    for _ in range(3):
        one.train_step()
    assert all(torch.equal(getattr(corpus, name), tensor) for name, tensor in kept.items())
    assert torch.equal(features, features_before)


@on_gpu
def test_captured_steps_with_a_compiled_loss_train_as_without_it() -> None:
    """The fourth step is the first that is captured."""
    _, corpus, _ = text("llama")
    model = adopt(tiny_model("llama", dtype=torch.bfloat16).cuda())
    features, rows = text_features(model, corpus, 3, model.device), EVERY_ROW.to("cuda")
    losses = []
    for compiled in (False, True):
        recipe = replace(RECIPE, compiled=compiled)
        one = Trainer(model, 1, corpus.to(model.device), features, rows, recipe, steps=8)
        for _ in range(8):
            one.train_step()
        losses.append(one.seen[0].cpu())
    assert losses[0].isfinite().all()
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0)


def test_a_text_of_fewer_rows_than_a_step_can_be_trained_on() -> None:
    model, corpus, features = text("llama")
    one = Trainer(model, 1, corpus.rows(slice(0, 2)), features[:2], EVERY_ROW, RECIPE, steps=2)
    for _ in range(2):
        one.train_step()
    assert torch.isfinite(one.seen).all()


def test_the_exit_of_a_quantized_model_is_trained_as_that_of_its_expanded_weights() -> None:
    """Its parameters are dense, in the model's dtype; the model's weights stay quantized."""
    _, corpus, _ = text("llama")
    dense = adopt(tiny_model("llama", dtype=torch.float32))
    named = {"embedding": dense.embedding.dense, "head": dense.head.dense, "norm": dense.norm}
    for index, layer in enumerate(dense.layers):
        named |= {f"layers.{index}.{name}": weight for name, weight in layer.tensors().items()}
    packed = {name: pack([quantize(weight, 8, 16)]) if weight.ndim == 2 else weight for name, weight in named.items()}
    expanded = {name: expand(weight, torch.float32) for name, weight in packed.items()}
    trainers = []
    for weights in (packed, expanded):
        model = Decoder(dense.config, weights)
        features = text_features(model, corpus, 3, torch.device("cpu"))
        trainers.append(Trainer(model, 2, corpus, features, EVERY_ROW, RECIPE, 4))
        for _ in range(4):
            trainers[-1].train_step()
    assert trainers[0].model.is_quantized and same(trainers[0].exit(), trainers[1].exit())
    assert {tensor.dtype for tensor in exit_tensors(trainers[0].exit()).values()} == {torch.float32}
