"""How much arithmetic a model costs: the one home of its FLOP count. Torch-free.

Counted are matrix products, a multiplication and an addition as two operations. What is done once a number (norms,
softmax, activations, rotation) is left out, as everywhere where a share of the peak is reported; so are the extra
products of schemes that read content (Shaw, CoPE).
"""

from model.config import ModelConfig


def matmul_parameters(config: ModelConfig) -> int:
    """Return how many weights multiply every token: L (2 C H D + 2 C G D + 3 C F) + C V.

    q and o are (C, H D), k and v (C, G D), gate, up and down (C, F). The output matrix counts whether it is shared or
    not; the embedding reads rows and multiplies nothing.
    """
    assert config.vocab_size is not None, "the count needs the size of the vocabulary"
    heads = 2 * config.n_heads + 2 * config.kv_heads
    layer = config.d_model * (heads * config.head_dim + 3 * config.hidden_width)
    return config.n_layers * layer + config.d_model * config.vocab_size


def causal_pairs(context: int) -> int:
    """Return how many (query, key) pairs see each other in a window of T tokens: T (T + 1) / 2."""
    return context * (context + 1) // 2


def forward_flops(config: ModelConfig, context: int | None = None) -> float:
    """Return the FLOPs a token of one forward pass: 2 N + 2 L H D (T + 1), N the matmul parameters.

    A visible pair costs 2 D for its score and 2 D for its value in each of H heads; a window of T tokens has
    T (T + 1) / 2 of them, so a token has (T + 1) / 2. `context` T is that of the configuration when not given.
    Kaplan et al. (2020, table 1) write 2 N + 2 L T H D.
    """
    length = context or config.context
    pairs_a_token = causal_pairs(length) / length
    return 2 * matmul_parameters(config) + 4 * config.n_layers * config.n_heads * config.head_dim * pairs_a_token


def training_flops(config: ModelConfig, context: int | None = None) -> float:
    """Return the FLOPs a token of forward and backward pass: 6 N + 6 L H D (T + 1).

    Each product has two in the backward pass, one for each factor's gradient. Chowdhery et al. (2022, appendix B) write
    6 N + 12 L H D T: they count pairs that the causal mask hides, about as many again. We count what must be computed,
    so a kernel that computes hidden pairs, or a checkpoint that computes twice, gains no utilisation by it.
    """
    return 3 * forward_flops(config, context)
