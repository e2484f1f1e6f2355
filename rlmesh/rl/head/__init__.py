"""The language-model head: log-probabilities and entropy of tokens, from logits or straight from hidden states."""

from rlmesh.rl.head.log_probs import (
    CHUNK_TOKENS,
    TILE_BYTES,
    TokenTerms,
    chunked_log_probs,
    entropy,
    tile_columns,
    token_log_probs,
)

__all__ = [
    "CHUNK_TOKENS",
    "TILE_BYTES",
    "TokenTerms",
    "chunked_log_probs",
    "entropy",
    "tile_columns",
    "token_log_probs",
]
