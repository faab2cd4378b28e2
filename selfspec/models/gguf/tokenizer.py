"""Rebuilds the tokenizer that a GGUF file describes, so that its folder loads like any other.

A file holds vocabulary, special tokens and chat template; how text is split before merging is told by a name only, and
merges are left out where llama.cpp can do without. Which tokens end a text is left to `gguf_model`.
"""

from __future__ import annotations

import logging
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from selfspec.models.gguf.model import GgufModel

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's kinds of token; the last two are matched whole

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
# By `tokenizer.ggml.pre`: the pattern that text is split by; None: GPT-2's, digits apart.
_SPLITS: dict[str, str | None] = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "smollm": None,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary is taken unmerged


def build_tokenizer(model: GgufModel) -> Any:
    """The file's tokenizer with its special tokens and chat template; ValueError if it cannot be rebuilt."""
    tokens, kind = model.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.model")
    settings: dict[str, Any] = {
        "padding_side": "left",
        "model_max_length": model.config.context,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = model.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            settings[f"{name}_token"] = tokens[index]
    settings.setdefault("pad_token", settings.get("eos_token"))
    try:
        backend = _byte_level(model) if kind == "gpt2" else _sentence_piece(model)
        whole = [
            AddedToken(token, normalized=False, special=token_kind == _CONTROL)
            for token, token_kind in zip(tokens, model.get("tokenizer.ggml.token_type", []), strict=False)
            if token_kind in (_CONTROL, _USER_DEFINED) and backend.token_to_id(token) is not None
        ]
        backend.add_tokens(whole)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    except Exception as error:  # a vocabulary that contradicts itself fails inside the libraries, in many ways
        raise ValueError(f"the tokenizer of {model.path} ({kind!r}) cannot be rebuilt: {error}") from error
    _set_bos(tokenizer, model)
    tokenizer.chat_template = model.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(model: GgufModel) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in model.get("tokenizer.ggml.merges")]
    pre = model.get("tokenizer.ggml.pre", "default")
    vocabulary = {token: index for index, token in enumerate(model.get("tokenizer.ggml.tokens"))}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if model.architecture.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(model: GgufModel) -> Tokenizer:
    """Mistral's and Gemma's kind: spaces are written as a visible character, unknown ones fall back to bytes."""
    gemma = model.architecture == "gemma3"
    tokens, unknown = model.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.unknown_token_id")
    if gemma:  # llama.cpp writes its tokens of several spaces as such
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    # The score says which merge comes first, but for Gemma, whose scores are void, the place in the vocabulary does.
    scores = [-index for index in range(len(tokens))] if gemma else model.get("tokenizer.ggml.scores")
    kinds = model.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    normal = {t: s for t, s, kind in zip(tokens, scores, kinds, strict=True) if kind in (_NORMAL, _USER_DEFINED)}
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown_token = None if unknown is None else tokens[unknown]
    bpe = BPE(vocabulary, _merges(normal), fuse_unk=True, byte_fallback=True, unk_token=unknown_token)
    tokenizer = Tokenizer(bpe)
    prefix = bool(model.get("tokenizer.ggml.add_space_prefix", not gemma))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first" if prefix else "never", split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    return tokenizer


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, the best-scored token's first."""
    found = [
        (score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    found.sort(key=lambda merge: (merge[0], len(merge[1])), reverse=True)
    return [(left, right) for _, left, right in found]


def _pre_tokenizer(pre: str) -> Any:
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
            "pre-tokenizer %r is unknown: text is split as GPT-2 does, which may differ", pre
        )
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _set_bos(tokenizer: Any, model: GgufModel) -> None:
    """Puts the begin token before every text if, and only if, the file says so."""
    by_default = model.get("tokenizer.ggml.model") == "llama" or model.get("tokenizer.ggml.pre") in _WHOLE_WORDS_FIRST
    if tokenizer.bos_token is None or not model.get("tokenizer.ggml.add_bos_token", by_default):
        begin, special = "", []
    else:
        begin, special = f"{tokenizer.bos_token} ", [(tokenizer.bos_token, tokenizer.bos_token_id)]
    template = processors.TemplateProcessing(single=f"{begin}$A", pair=f"{begin}$A $B", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
