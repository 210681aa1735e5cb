"""What Gemma 3 has beyond Llama (formats/README.md, "model.h5", extended models), from GGUF metadata or config.json:
layers with a window and a RoPE of their own among layers without, norms behind the projections, a GELU, scaled
embeddings. Windows of other families are read here too."""
import math

from artefact import need
from rope_scaling import inverse_frequencies

PATTERN = 6            # every sixth layer sees all tokens, where nothing else is said
LOCAL_THETA = 10000.0  # RoPE of the layers with a window, where nothing else is said
# Hugging Face's names where they differ from Llama's.
FOLDER_NAMES = {"ffn_norm": "pre_feedforward_layernorm.weight"}


def extension(hidden):
    """Root attributes of an extended model that is a Gemma."""
    return dict(activation="gelu_tanh", post_norms=1, embedding_scale=math.sqrt(hidden))


def windows_of(window, is_local):
    need(isinstance(window, int) and window > 0, f"sliding_window must be a positive integer, found {window!r}")
    return [window if local else 0 for local in is_local]


def by_pattern(pattern, n_layers):
    """Layer by layer, whether it has a window: all but every pattern-th, or as a list says."""
    if isinstance(pattern, list):
        need(len(pattern) == n_layers, f"sliding_window_pattern has {len(pattern)} layers of {n_layers}")
        return [bool(local) for local in pattern]
    need(isinstance(pattern, int) and pattern > 0,
         f"sliding_window_pattern must be a positive integer, found {pattern!r}")
    return [(layer + 1) % pattern != 0 for layer in range(n_layers)]


def gguf_extension(model, setting, field):
    a = model.attributes
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        need(not setting(name, 0), f"gemma3.{name} = {setting(name, 0)} is not supported")
    pattern = field("gemma3.attention.sliding_window_pattern", PATTERN)
    model.window = windows_of(setting("attention.sliding_window"), by_pattern(pattern, a["n_layers"]))
    a.update(extension(a["hidden_size"]), architecture="extended")
    theta = float(setting("rope.freq_base_swa", LOCAL_THETA))
    model.local_frequencies, _ = inverse_frequencies(theta, model.layer["rope_dims"], {"type": "none"})
    if a["n_layers"] == 62 and not setting("attention.scale", 0.0):  # 27B, whose metadata does not say it
        model.layer["logit_scale"] = math.sqrt(model.layer["n_q_heads"] / a["hidden_size"])


def folder_windows(config, architecture, n_layers):
    """Window of each layer, 0 where it sees all; None: no layer has one."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    switched_on = architecture in ("MistralForCausalLM", "Gemma3ForCausalLM")
    if not window or not config.get("use_sliding_window", switched_on):
        return None
    if kinds:
        known = {"sliding_attention": True, "full_attention": False}
        need(len(kinds) == n_layers and set(kinds) <= set(known),
             f"config.json: layer_types must name {n_layers} layers, each {' or '.join(known)}")
        return windows_of(window, [known[kind] for kind in kinds])
    if architecture == "Gemma3ForCausalLM":
        return windows_of(window, by_pattern(config.get("sliding_window_pattern", PATTERN), n_layers))
    if architecture == "MistralForCausalLM":
        return windows_of(window, [True] * n_layers)
    first = config.get("max_window_layers")
    need(isinstance(first, int), f"config.json: max_window_layers must be an integer, found {first!r}")
    return windows_of(window, [layer >= first for layer in range(n_layers)])


def folder_extension(model, config, setting):
    a = model.attributes
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        need(not config.get(name), f"config.json: {name} {config.get(name)} is not supported")
    need(config.get("hidden_activation", "gelu_pytorch_tanh") == "gelu_pytorch_tanh",
         f"config.json: hidden_activation '{config.get('hidden_activation')}' is not gelu_pytorch_tanh")
    a.update(extension(a["hidden_size"]), architecture="extended")
    model.layer["logit_scale"] = 1 / math.sqrt(setting("query_pre_attn_scalar", 256))
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    theta = local.get("rope_theta") or setting("rope_local_base_freq", LOCAL_THETA)
    model.local_frequencies, _ = inverse_frequencies(float(theta), model.layer["rope_dims"], {"type": "none"})
