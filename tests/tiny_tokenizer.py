"""Tokenizers of 101 tokens for the tiny models: one of characters, bytes and words, one of words with spaces."""

from __future__ import annotations

from string import ascii_letters, digits

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCABULARY

SPECIAL = ["<pad>", "<s>", "</s>"]
BYTES = sorted(set("é€😀日".encode()))  # 12 bytes, none in two characters
PUNCTUATION = list(" .,!?-:;\n")
WORDS = ["the", "and", "ing", "stop", "STOPPED", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TOKENS = [*SPECIAL, *ascii_letters, *digits, *(f"<0x{byte:02X}>" for byte in BYTES), *PUNCTUATION, *WORDS, "ten"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Encodes text character by character; word tokens occur only in generated text."""
    assert len(set(TOKENS)) == len(TOKENS) == VOCABULARY
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(TOKENS)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


JSON_TOKENS = [*SPECIAL, *(chr(code) for code in range(32, 127)), "\n", *(f"<0x{byte:02X}>" for byte in BYTES)]
JSON_TOKENS += ['{"', '":', '","', '"}', '": ', ", ", "true", "false", "null", "10", "the", "ing", "<end>"]


def json_tokenizer() -> PreTrainedTokenizerFast:
    """Encodes text character by character, JSON's included; "<end>" is a special token like "</s>"."""
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(JSON_TOKENS)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2],
        extra_special_tokens=["<end>"],
    )  # fmt: skip


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Word tokens that begin with the space before the word; decoding drops the space of a text's first word."""
    words = [*SPECIAL, *(f"▁w{index}" for index in range(len(SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def ids_of(*pieces: str) -> list[int]:
    """Token ids of words, characters and characters of several bytes, each piece in the fewest tokens."""
    ids = []
    for piece in pieces:
        tokens = [piece] if piece in TOKENS else [f"<0x{byte:02X}>" for byte in piece.encode()]
        ids += [TOKENS.index(token) for token in tokens]
    return ids
