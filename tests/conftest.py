"""What many tests share: tiny models whose weights are large enough that every fault shows."""

import os
import random

import hypothesis
import pytest
import torch

from model.config import ModelConfig
from model.transformer import Transformer

# A landing must not depend on luck; everywhere else each run of the suite tries other examples.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# Each scheme of the table, and each arm that is a setting of one.
ARMS = {
    "nope": {"kind": "nope"},
    "learned": {"kind": "learned", "init_std": 1.0},
    "learned_all": {"kind": "learned", "init_std": 1.0, "layers": "all"},
    "sinusoidal": {"kind": "sinusoidal", "scale": 1.0},
    "sinusoidal_all": {"kind": "sinusoidal", "scale": 1.0, "layers": "all"},
    "rope": {"kind": "rope"},
    "rope_half": {"kind": "rope", "layout": "half", "base": 500.0},
    "rope_partial": {"kind": "rope", "fraction": 0.5},
    "rope_first": {"kind": "rope", "layers": "first"},
    "rope_and_nope": {"kind": "rope", "layers": "all but every 2nd"},
    "rope_still": {"kind": "rope", "turning_pairs": 0.5},
    "rope_log_n": {"kind": "rope", "log_n": True},
    "rope_linear": {"kind": "rope", "scaling": "linear"},
    "rope_ntk": {"kind": "rope", "scaling": "ntk"},
    "rope_dynamic_ntk": {"kind": "rope", "scaling": {"kind": "dynamic_ntk", "factor": 2.0}},
    "rope_yarn": {"kind": "rope", "scaling": {"kind": "yarn", "factor": 4.0}},
    "rope_llama3": {"kind": "rope", "scaling": {"kind": "llama3", "factor": 4.0}},
    "rope_longrope": {"kind": "rope", "scaling": {"kind": "longrope", "trained_length": 16}},
    "rope_input": {"kind": "rope_input"},
    "learned_clamp": {"kind": "learned", "init_std": 1.0, "beyond": "clamp"},
    "learned_wrap": {"kind": "learned", "init_std": 1.0, "beyond": "wrap"},
    "learned_interpolate": {"kind": "learned", "init_std": 1.0, "beyond": "interpolate"},
    "xpos": {"kind": "xpos"},
    "alibi": {"kind": "alibi"},
    "t5": {"kind": "t5", "buckets": 8, "max_distance": 24, "init_std": 1.0},
    "kerple": {"kind": "kerple"},
    "kerple_power": {"kind": "kerple", "form": "power"},
    "fire": {"kind": "fire"},
    "sandwich": {"kind": "sandwich"},
    "shaw": {"kind": "shaw", "init_std": 1.0},
    "cope": {"kind": "cope", "max_position": 8, "init_std": 1.0},
}


def tiny_config(position="rope", **changes) -> ModelConfig:
    """A config of 3 layers, 6 query heads on 2 key heads, head_dim 8."""
    shape = {"n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "d_model": 48, "d_ff": 64, "vocab_size": 61, "context": 64}
    scheme = ARMS[position] if isinstance(position, str) else position
    return ModelConfig.model_validate({**shape, "position": scheme, **changes})


def loud_model(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64, gain: float = 12.0
) -> Transformer:
    """A model in evaluation mode whose weights are scaled up.

    At initialisation attention is almost uniform and logits are almost zero: a wrong position would change nothing.
    """
    model = Transformer(config, seed).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.startswith("position."):
                parameter.mul_(gain)
    return model


def random_tokens(rows: int, length: int, vocab_size: int = 61, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def few_threads():
    """Tiny tensors are slower on many threads, and tests shall not depend on how many there are."""
    torch.set_num_threads(1)


@pytest.fixture(params=ARMS)
def arm(request):
    """The name of each scheme, and of each arm that is a setting of one."""
    return request.param


WORDS = ["the", "wheel", "turns", "by", "an", "equal", "angle", "for", "every", "step", "and", "keeps", "distance"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of 30 documents of words, and where their tokens are kept."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(30):
        (folder / f"{number}.txt").write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(30)))
    return folder


@pytest.fixture
def settings(corpus):
    """The settings of a run of 20 steps, with dropout and accumulation, that saves every 7 steps."""
    return {
        "model": {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "context": 24, "dropout": 0.1},
        "data": {"corpus": {"kind": "files", "paths": [str(corpus)]}, "vocab_size": 300, "folder": str(corpus / "p")},
        "optimizer": {"lr": 1e-2, "warmup_steps": 5},
        "training": {
            "steps": 20, "batch_size": 6, "micro_batch_size": 4, "eval_every": 10, "eval_windows": 8,
            "checkpoint_every": 7, "log_every": 2, "sample_every": 10, "sample_prompt": "the", "sample_tokens": 4,
        },
    }  # fmt: skip
