"""Rebuilds the tokenizer of a GGUF file as a transformers tokenizer.

A file holds vocabulary, special tokens and chat template. It names the rule by which text is split before merging; a
SentencePiece file has scores instead of merges. `model` finds the tokens that end a text.
"""

from __future__ import annotations

import logging
from math import isfinite
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from selfspec.models.gguf.model import GgufModel

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's token types; the last two are never split or merged

_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By `tokenizer.ggml.pre`: the pattern that splits text; None: GPT-2's pattern, with single digits.
_SPLITS: dict[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "smollm": None,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary becomes one token


def build_tokenizer(model: GgufModel) -> Any:
    """Returns the file's tokenizer with its special tokens and chat template; raises ValueError if it cannot."""
    tokens, kind = model.tokens, model.get("tokenizer.ggml.model")
    settings: dict[str, Any] = {
        "padding_side": "left",
        "model_max_length": model.config.context,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = model.token_id(key)
        if index is not None:
            settings[f"{name}_token"] = tokens[index]
    settings.setdefault("pad_token", settings.get("eos_token"))
    try:
        backend = _byte_level(model) if kind == "gpt2" else _sentence_piece(model)
        whole = [
            AddedToken(token, normalized=False, special=token_kind == _CONTROL)
            for token, token_kind in zip(tokens, _kinds(model), strict=True)
            if token_kind in (_CONTROL, _USER_DEFINED) and backend.token_to_id(token) is not None
        ]
        backend.add_tokens(whole)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    except Exception as error:  # the libraries raise many types of errors for an inconsistent vocabulary
        raise ValueError(f"the tokenizer of {model.path} ({kind!r}) cannot be rebuilt: {error}") from error
    _set_bos(tokenizer, model)
    tokenizer.chat_template = model.text("tokenizer.chat_template") or None
    return tokenizer


def _kinds(model: GgufModel) -> list[int]:
    """Returns llama.cpp's type of every token."""
    key, count = "tokenizer.ggml.token_type", len(model.tokens)
    return [_NORMAL] * count if model.get(key) is None else model.array(key, int, count)


def _byte_level(model: GgufModel) -> Tokenizer:
    """Returns a byte-level BPE tokenizer, as GPT-2's: bytes are written as visible characters and merged."""
    merges = [tuple(merge.split(" ")) for merge in model.array("tokenizer.ggml.merges", str)]
    pre = model.text("tokenizer.ggml.pre", "default")
    vocabulary = {token: index for index, token in enumerate(model.tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if model.architecture.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(model: GgufModel) -> Tokenizer:
    """Returns a SentencePiece tokenizer, as Mistral's and Gemma's: spaces are written as a visible character, unknown
    characters as bytes."""
    gemma = model.architecture == "gemma3"
    tokens, unknown = model.tokens, model.token_id("unknown")
    if gemma:  # llama.cpp writes gemma's tokens of several spaces with plain spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    # Merges apply in the order of scores; Gemma's scores are all equal, and its order is that of the vocabulary.
    by_index = [-float(index) for index in range(len(tokens))]
    scores = by_index if gemma else model.array("tokenizer.ggml.scores", float, len(tokens))
    if not all(map(isfinite, scores)):
        raise ValueError("tokenizer.ggml.scores holds numbers that are not finite")
    kinds = zip(tokens, scores, _kinds(model), strict=True)
    normal = {token: score for token, score, kind in kinds if kind in (_NORMAL, _USER_DEFINED)}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown_token = None if unknown is None else tokens[unknown]
    bpe = BPE(vocabulary, _merges(normal), fuse_unk=True, byte_fallback=True, unk_token=unknown_token)
    tokenizer = Tokenizer(bpe)
    prefix = model.flag("tokenizer.ggml.add_space_prefix", not gemma)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first" if prefix else "never", split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Returns every pair of tokens that joins to a third, sorted by the score of the third, highest first."""
    found = [
        (score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    found.sort(key=lambda merge: (merge[0], len(merge[1])), reverse=True)
    return [(left, right) for _, left, right in found]


def _pre_tokenizer(pre: str) -> Any:
    """Returns the pre-tokenizer, which splits text before merging, by the file's name for it."""
    if pre in _SPLITS:
        split = _SPLITS[pre]
        first = (
            pre_tokenizers.Digits(individual_digits=True)
            if split is None
            else pre_tokenizers.Split(Regex(split), "isolated")
        )
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
        return pre_tokenizers.Sequence([first, rest])
    if pre not in ("default", "gpt-2"):
        logging.getLogger(__name__).warning(
            "pre-tokenizer %r is unknown: text is split by GPT-2's pattern, which may give other tokens", pre
        )
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _set_bos(tokenizer: Any, model: GgufModel) -> None:
    """Makes the tokenizer put the begin token before every text if and only if the file says so."""
    by_default = model.get("tokenizer.ggml.model") == "llama" or model.text("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    if not model.flag("tokenizer.ggml.add_bos_token", by_default) or tokenizer.bos_token is None:
        begin, special = "", []
    else:
        begin, special = f"{tokenizer.bos_token} ", [(tokenizer.bos_token, tokenizer.bos_token_id)]
    template = processors.TemplateProcessing(single=f"{begin}$A", pair=f"{begin}$A $B", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
