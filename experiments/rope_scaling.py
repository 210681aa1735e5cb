"""RoPE as a vector of inverse frequencies (formats/README.md, "Geometry"), scaled as configurations say."""
import math

import numpy as np

from artefact import need


def inverse_frequencies(theta, dims, scaling):
    """The vector of formats/README.md, "Geometry", and the attention factor. scaling: {"type": "none" |
    "linear" | "llama3" | "yarn", ...} with the parameters' names of Hugging Face's rope_scaling."""
    plain = theta ** -(np.arange(0, dims, 2, dtype=np.float64) / dims)
    kind = scaling["type"]
    if kind == "none":
        return plain, 1.0
    factor = positive(scaling, "factor")
    if kind == "linear":
        return plain / factor, 1.0
    trained = positive(scaling, "original_max_position_embeddings")
    if kind == "llama3":
        low, high = positive(scaling, "low_freq_factor"), positive(scaling, "high_freq_factor")
        turns = trained * plain / (2 * np.pi)         # full turns within the context it was trained on
        share = np.clip((turns - low) / (high - low), 0, 1)
        return plain * (share + (1 - share) / factor), 1.0
    # YaRN (arXiv 2309.00071): pairs that turn often keep their frequency, slow ones are interpolated, between
    # them is a ramp.
    def pair_with(turns):
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
    first = max(math.floor(pair_with(scaling.get("beta_fast") or 32)), 0)
    last = min(math.ceil(pair_with(scaling.get("beta_slow") or 1)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - first) / max(last - first, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, yarn_attention_factor(scaling, factor)


def yarn_attention_factor(scaling, factor):
    if scaling.get("attention_factor") is not None:
        return positive(scaling, "attention_factor")
    def grown(scale):
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1)


def positive(settings, name):
    value = settings.get(name)
    need(isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf,
         f"RoPE scaling {settings['type']}: {name} must be a number above 0, found {value!r}")
    return float(value)
