"""Tokenizers of 101 tokens for the tiny models: one of characters, bytes and a few words, one of spaced words."""

from __future__ import annotations

from string import ascii_letters, digits

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCABULARY

SPECIAL = ["<pad>", "<s>", "</s>"]
BYTES = sorted(set("é€😀日".encode()))  # twelve, none shared
PUNCTUATION = list(" .,!?-:;\n")
WORDS = ["the", "and", "ing", "stop", "STOPPED", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TOKENS = [*SPECIAL, *ascii_letters, *digits, *(f"<0x{byte:02X}>" for byte in BYTES), *PUNCTUATION, *WORDS, "ten"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Text is encoded character by character; words are only ever generated."""
    assert len(set(TOKENS)) == len(TOKENS) == VOCABULARY
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(TOKENS)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """101 words whose tokens begin with the space before them; the first word of a text is shown without it."""
    words = [*SPECIAL, *(f"▁w{index}" for index in range(len(SPECIAL), VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def ids_of(*pieces: str) -> list[int]:
    """Token ids of words, characters and longer characters, each piece spelled with the fewest tokens."""
    ids = []
    for piece in pieces:
        known = [piece] if piece in TOKENS else [f"<0x{byte:02X}>" for byte in piece.encode()]
        ids += [TOKENS.index(token) for token in known]
    return ids
