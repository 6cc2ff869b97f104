"""Names that a spec cannot give to its parameters, inputs and definitions, and why."""

from __future__ import annotations

import keyword
import re

# What means something in an expression.
_LANGUAGE = """
exp log abs sqrt min max clip sigmoid tanh sg
pi prox mu ref r c rho A R T f W len n_tokens n_seqs n_groups group_size group_tokens entropy v kappa
M kl tv k1 k2 k3 binary_kl binary_tv
token_mean group_token_mean seq_mean_token_mean group_mean_token_mean seq_mean_token_sum group_mean_token_sum
seq_mean_token_sum_norm sum
"""

# What means something in the generated module: its inputs, its helpers, the names its own lines use.
_MODULE = """
logp prox_logp mu_logp ref_logp mask advantages groups seq_ids segment_ids counts length lengths tokens logits hidden
lm_head_weight bias temperature shift max_chunk_bytes max_logits_bytes inplace
logit_scale softcap vocab_size inputs rewards mu_logprobs prox_logprobs ref_logprobs
mu_topk_ids mu_topk_logprobs log_pi log_prox log_mu log_ref
compile compiled debug metrics on_missing params
ax exp log div log_bound torch Tensor Weights PolicyLoss Loss Any float self
lam value coef objective grads ratios limits outside
advantage keep kept reward shape prepare needs name spec_hash rescale merge summary from_logits from_hidden
weights distribution d_distribution centre before known live PARAMS NEEDS INPUTS SUMS ADVANTAGES TOPK LEVEL LOCAL_STATISTICS
"""

# The public attributes of torch.nn.Module, which the loss is: reading `loss_fn.half` must give what it always gives.
_TORCH_MODULE = """
T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval
extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia
named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory
state_dict to to_empty train type xpu zero_grad
"""

LANGUAGE_NAMES = frozenset(_LANGUAGE.split())
MODULE_NAMES = frozenset((_MODULE + _TORCH_MODULE).split())

_FUNCTIONS = frozenset("exp log abs sqrt min max clip sigmoid tanh sg".split())  # noqa: SIM905
_REDUCTION = re.compile(r"(sum|mean|prod|geomean|max|min|any|all|std|quantile|loo)_[tsgbv]")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


def why_not(name: str, argument: bool = False) -> str | None:
    """Why a name cannot be given to a parameter, input or definition (or to a function's argument); None if it can."""
    if not _IDENTIFIER.fullmatch(name):
        return "a name is a letter, then letters, digits or _, at most 40 in all"
    if keyword.iskeyword(name):
        return "this is a word of Python, and parameters become Python arguments"
    if argument:
        means = name in _FUNCTIONS or _REDUCTION.fullmatch(name)
        return "this already means something in the language" if means else None
    if name in LANGUAGE_NAMES or _REDUCTION.fullmatch(name):
        return "this already means something in the language"
    if name in MODULE_NAMES:
        return "this name is taken in the generated module"
    return None
