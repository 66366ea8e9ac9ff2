"""The words of a parameter's name, in the one vocabulary that all projects' names come down to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_PART = re.compile(r"\d+(?![A-Za-z])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+[A-Za-z]*")

# What the last part of a name says that the array is.
_LEAF_WORDS = {
    "weight": "weight weights kernel w scale gamma embedding embeddings table",
    "bias": "bias biases b beta offset",
    "mean": "mean",
    "var": "var variance",
}
_LEAVES = {word: leaf for leaf, words in _LEAF_WORDS.items() for word in words.split()}
# Words that say nothing of their own, as most parts have them.
_NOISE_TEXT = (
    "model models module modules base transformer network net params param parameter parameters "
    "layer layers block blocks blk h proj projection linear dense lin the raw list sequential seq "
    "batch stats running moving stage stages dot product multi head heads based"
)
_NOISE = frozenset(_NOISE_TEXT.split())
# Canonical word -> its synonyms; with a space between them, parts that follow each other.
_SYNONYMS = {
    "q": "q query queries wq to_q q_einsum",
    "k": "k key keys wk to_k",
    "v": "v value values wv to_v",
    "o": "o wo out out_proj to_out attn_vec",
    "out": "output c_proj",  # of attention, or of what follows it
    "qkv": "qkv wqkv query_key_value c_attn in_proj qkv_einsum",
    "kv": "kv wkv kv_einsum key_value",
    "attn": "attn attention attentions mha selfattention self_attn self_attention sa msa "
    "multi_head_attention mha_0",
    "cross attn": "cross crossattention cross_attn cross_attention enc_dec_attention xattn "
    "encdecattention enc_dec encoder_attn encoder_decoder_attention multihead_attn",
    "mlp": "mlp ffn ff feedforward feed_forward ffw positionwise dense_relu_dense",
    "gate": "gate gate_proj wg wi_0 gating",
    "up": "up up_proj wi_1 c_fc intermediate dense_h_to_4h fc_in lin1 linear1",
    "down": "down down_proj dense_4h_to_h fc_out lin2 linear2",
    "gate up": "gate_up gateup",
    "norm": "norm ln layernorm rmsnorm layer_norm rms_norm group_norm batch_norm bn gn norms "
    "batchnorm groupnorm",
    "embed": "embed embedding embeddings embedder emb",
    "token": "token tokens tok word words vocab wte shared",
    "pos": "pos position positions positional wpe",
    "type": "type segment token_type",
    "head": "lm_head classifier logits score unembed head lm",
    "encoder": "encoder enc",
    "decoder": "decoder dec",
    "final": "final ln_f last",
    "shortcut": "shortcut downsample skip",
    "patch": "patch patches patch_embed patch_embedding",
    "cls": "cls class",
    "router": "router gate_logits",
    "expert": "expert experts moe",
    "ih": "ih input_hidden",
    "hh": "hh hidden_hidden",
}
# Words that say where a norm is in its block.
PLACES = frozenset(["pre", "before", "input", "first", "in", "post", "after", "output", "second"])
# Of these words one name has the one and another name the other, if they are of two arrays.
_EXCLUSIVE = tuple(
    frozenset(words.split())
    for words in (
        "q k v o",
        "weight bias mean var",
        "encoder decoder",
        "gate up down",
        "pos token type patch cls",
        "embed head",
        "ih hh",
    )
)
_MIXED = frozenset({"mlp", "attn"})  # unless of a norm, which may be named for what is before it


def _split(text: str) -> list[str]:
    return [part.lower() for part in _PART.findall(text)]


class Words(NamedTuple):
    """The canonical words of a name."""

    leaf: str  # what the array is of its layer: `weight`, `bias`, `mean`, `var`; or empty
    path: frozenset[str]  # without those that say nothing

    def contradicts(self, other: Words) -> bool:
        """Returns whether two names cannot be of the same array."""
        a, b = (words.path | {words.leaf} for words in (self, other))
        both = a & b
        for words in _EXCLUSIVE:
            if a & words and b & words and not both & words:
                return True
        mixed = "norm" not in a | b and a & _MIXED and b & _MIXED and not both & _MIXED
        return bool(mixed) or (("cross" in a) != ("cross" in b) and bool(a & b & {"attn"}))


@cache
def words_of(name: str, ndim: int = 1) -> Words:
    """Returns the words of a name, in which numbers that count layers are braces.

    With more than one dimension, `b` is not a bias.

    Examples:
        >>> words_of("layers.{}.self_attn.q_proj.weight") == ("weight", {"attn", "q"})
        True
    """
    parts = [_split(part) for part in re.split(r"[./]", name)]
    leaf = ""
    last = parts[-1]
    at = next((i for i in reversed(range(len(last))) if last[i] in _LEAVES), None)
    if ndim > 1 and at is not None and last[at] == "b":
        at = None
    if at is not None and (last[at] not in ("embedding", "embeddings") or len(last) == 1):
        leaf = _LEAVES[last[at]]
        last = last[:at] + last[at + 1 :]
    words = {word for part in [*parts[:-1], last] for word in _canonical(part)}
    if "mlp" in words and "attn" not in words:
        words = {_LAST.get(word, word) for word in words}
    elif "out" in words:
        inner = "down" if "{}" in name else "head"
        words = words - {"out"} | {"o" if "attn" in words else inner}
    if {"mlp", "fc"} <= words:
        words = {_HALVES.get(word, word) for word in words}
    return Words(leaf, frozenset(words))


_LAST = {"o": "down", "out": "down"}
_HALVES = {"#1": "up", "#2": "down"}  # fc1 and fc2


def _canonical(part: list[str]) -> Iterator[str]:
    """Yields the words that the parts of a name stand for, the longest known runs first."""
    table = _table()
    at = 0
    while at < len(part):
        for size in range(min(4, len(part) - at), 0, -1):
            synonyms = table.get(tuple(part[at : at + size]))
            if synonyms is not None:
                yield from synonyms
                at += size
                break
        else:
            word = part[at]
            if word.isdigit():
                yield f"#{int(word)}"
            elif word not in _NOISE:
                yield word
            at += 1


@cache
def _table() -> dict[tuple[str, ...], tuple[str, ...]]:
    return {
        tuple(_split(name)): tuple(canonical.split())
        for canonical, names in _SYNONYMS.items()
        for name in names.split()
    }
