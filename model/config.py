"""The shape of the network. Torch-free."""

from typing import Annotated

from pydantic import Field, model_validator

from model.position import PositionConfig
from model.position.config import RoPEConfig
from model.settings import Settings

Count = Annotated[int, Field(ge=1)]


class ModelConfig(Settings):
    """The shape of the network and its positional scheme."""

    n_layers: Count = 4
    """Number of Transformer blocks."""
    n_heads: Count = 6
    """Query heads; each is d_model / n_heads wide."""
    n_kv_heads: Count | None = None
    """Key and value heads, each shared by n_heads / n_kv_heads query heads; none: n_heads."""
    d_model: Count = 192
    """Width of the residual stream."""
    d_ff: Count | None = None
    """Hidden width of the SwiGLU feed-forward layer; none: 8/3 d_model, rounded up to a multiple of 32."""
    vocab_size: Count | None = None
    """Number of token ids; none: that of the tokenizer."""
    context: Count = 256
    """Training window, in tokens."""
    tie_embeddings: bool = True
    """Share one matrix between the token embedding and the output layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping a value after the embedding, in the attention weights and after each sub-layer."""
    qk_norm: bool = False
    """Normalise each head's queries and keys before they are turned (RMSNorm over head_dim)."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the mean square in RMSNorm."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of a matrix at the start."""
    position: PositionConfig = RoPEConfig()
    """How the network is told where its tokens are."""
    random_positions: Count | None = None
    """Place a text's tokens at ordered random positions below this number (Ruoss et al., 2023); none: at 0, 1, ..."""

    @property
    def head_dim(self) -> int:
        """D, the width of one head."""
        return self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """G, the number of key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def hidden_width(self) -> int:
        """The width of the feed-forward layer."""
        return self.d_ff or -(-8 * self.d_model // (3 * 32)) * 32

    @property
    def embedding_std(self) -> float:
        """The standard deviation of the token embedding at the start, and of the output layer.

        RMSNorm undoes the embedding's scale, so with tied embeddings the logit of the token just read starts larger the
        wider the model is: at 0.02 and d_model 512 the loss starts 0.13 to 0.16 above ln(vocabulary), at 2 / d_model
        on it.
        """
        return min(self.init_std, 2 / self.d_model)

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "ModelConfig":
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}")
        if self.n_heads % self.kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.kv_heads}")
        if self.random_positions is not None and self.random_positions < self.context:
            raise ValueError(f"random_positions {self.random_positions} is smaller than context {self.context}")
        self.position.check(self.d_model, self.head_dim, self.n_layers)
        return self
