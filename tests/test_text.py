"""Between text and tokens: messages in their accepted forms, and pieces that make up what a text adds to its prompt."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from selfspec.text import Detokenizer, encode
from tests.tiny_tokenizer import ids_of, spaced_tokenizer, tiny_tokenizer

CHAT = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
PIECES = ["<s>", "</s>", "▁the", "▁second", "▁is", "▁", "third", ".", "<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "<0xAC>"]
EURO = ["<0xE2>", "<0x82>", "<0xAC>"]


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Like Llama's: a space belongs to the word after it, and the first one of a text is dropped."""
    tokenizer = Tokenizer(BPE({piece: index for index, piece in enumerate(PIECES)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def pieces(*names: str) -> list[int]:
    return [PIECES.index(name) for name in names]


@settings(max_examples=300)
@given(data=st.data())
@pytest.mark.parametrize("tokenizer", [sentence_pieces(), spaced_tokenizer()], ids=["sentence-pieces", "spaced-words"])
def test_the_text_is_what_the_answer_adds_to_the_prompt(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    """However the answer is cut into pieces, and whatever special tokens the prompt ends with."""
    whole = st.sampled_from([token for token in range(8) if token != 1])  # no half characters: they are shown below
    prompt = data.draw(st.lists(whole, min_size=1, max_size=30)) + [0] * data.draw(st.sampled_from([0, 1, 12]))
    answer = data.draw(st.lists(whole, max_size=8))
    decoded = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (prompt, prompt + answer)]
    detokenizer = Detokenizer(tokenizer, prompt)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=3)))
    text = "".join(
        detokenizer.add(answer[start:stop], last=stop == len(answer) and last)
        for start, stop, last in zip([0, *cuts], [*cuts, len(answer)], [False] * len(cuts) + [True], strict=True)
    )
    assert decoded[0] + text == decoded[1]


def test_half_of_a_surrogate_pair_is_refused_by_its_place() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    for prompt in "ab\ud83d", [{"role": "user", "content": "ab\ud83d"}]:
        with pytest.raises(ValueError, match=r"not Unicode.*\\ud83d.*position"):
            encode(tokenizer, prompt)


@pytest.mark.parametrize("template", ["{{ raise_exception('no system role') }}", "{{ messages[0].content + 1 }}"])
def test_messages_that_the_chat_template_refuses_are_an_error_that_says_so(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"chat template refuses these messages: (no system role|can only conc)"):
        encode(tokenizer, [{"role": "system", "content": "Be brief."}])


def test_the_first_word_keeps_its_space() -> None:
    detokenizer = Detokenizer(sentence_pieces(), pieces("<s>", "▁the", "▁second", "▁is"))
    assert detokenizer.add(pieces("▁the")) == " the"
    assert detokenizer.add(pieces("▁second", "."), last=True) == " second."


def test_a_character_begun_in_the_prompt_comes_whole() -> None:
    detokenizer = Detokenizer(sentence_pieces(), pieces("▁the", "<0xC3>"))
    assert detokenizer.add(pieces("<0xA9>")) == "é"
    assert detokenizer.add(pieces("."), last=True) == "."


def test_half_a_character_at_the_prompts_end_is_the_prompts() -> None:
    assert Detokenizer(sentence_pieces(), pieces("▁the", "<0xE2>")).add(pieces("."), last=True) == "."


def test_an_incomplete_character_at_the_end_leaves_the_one_before_it_whole() -> None:
    answer = pieces("<0xC3>", "<0xA9>", *EURO[:2])
    detokenizer = Detokenizer(sentence_pieces())
    assert [detokenizer.add([token], last=token == answer[-1]) for token in answer] == ["", "é", "", "\ufffd\ufffd"]
    assert Detokenizer(sentence_pieces()).add(answer, last=True) == "é\ufffd\ufffd"


def test_characters_of_several_tokens_may_follow_a_prompt_that_ends_with_many() -> None:
    detokenizer = Detokenizer(sentence_pieces(), pieces("▁the", *EURO * 4))
    assert detokenizer.add(pieces(*EURO)) == "€"


class Counting:
    """A tokenizer that counts the tokens of each decoding."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        self.decoded.append(len(tokens))
        return tiny_tokenizer().decode(tokens, **kwargs)


def test_a_long_prompt_is_not_decoded_as_a_whole() -> None:
    tokenizer = Counting()
    Detokenizer(tokenizer, ids_of("a") * 5000).add(ids_of("b"))
    assert max(tokenizer.decoded) < 100


def test_tokens_that_never_make_a_character_are_not_decoded_again_with_each_token() -> None:
    tokenizer = Counting()
    assert Detokenizer(tokenizer).add(ids_of("é")[:1] * 200, last=True) == "\ufffd" * 200
    assert sum(tokenizer.decoded) < 40 * 200


def test_a_text_longer_than_the_tokenizers_limit_is_encoded_without_its_warning() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 2
    assert len(encode(tokenizer, "a longer text")) > 2 and not tokenizer.deprecation_warnings


class TestMessages:
    def encoded(self, content: Any) -> str:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = CHAT
        return tokenizer.decode(encode(tokenizer, [{"role": "user", "content": content}]))

    def test_text_parts_are_joined(self) -> None:
        parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        assert self.encoded(parts) == self.encoded("one two") == "user:one two;"

    @pytest.mark.parametrize(
        ("part", "named"),
        [
            ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
            ({"type": "text"}, "'text'"),
            ({"type": "text", "text": 5}, "'text'"),
            ("hello", "'hello'"),
        ],
        ids=["image", "no-text", "number", "string"],
    )
    def test_any_other_part_is_refused_by_name(self, part: Any, named: str) -> None:
        with pytest.raises(ValueError, match=named):
            self.encoded([{"type": "text", "text": "one"}, part])

    def test_the_callers_messages_stay_as_they_were(self) -> None:
        messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = CHAT
        encode(tokenizer, messages)
        assert messages == [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
