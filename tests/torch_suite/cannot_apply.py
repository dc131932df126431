"""PyTorch's tests that cannot apply to an optimizer around another, each with its reason."""

import re

CANNOT_APPLY: list[tuple[str, str]] = [
    (
        r"_LBFGS_|test_second_order_optims_return_consistent_types",
        "LBFGS calls its closure several times within a step; a step here has one gradient",
    ),
    (
        r"\.test_complex(_2d)?_",
        "complex parameters are refused",
    ),
    (
        r"\.test_step_all_hooks_",
        "hooks for all optimizers run for the wrapper and for the optimizer inside it",
    ),
    (
        r"\.test_(foreach|fused)_matches_forloop_",
        "the test freezes a layer after the optimizer was built, which is refused at the next sync",
    ),
    (
        r"\.test_fused_error_on_params_on_meta_",
        "parameters on the meta device have no values that workers could compare",
    ),
    (
        r"\.test_errors_",
        "the test builds optimizers without a trainable parameter, which are refused",
    ),
    (
        r"\.test_state_dict_deterministic_",
        "the states of two runs differ in the seconds of their ledgers",
    ),
    (
        r"\.test_add_param_group_",
        "parameters cannot be added to a palsgd optimizer; a new one is built instead",
    ),
    (
        r"\.test_new_pattern_no_warning",
        "the test steps without gradients, of which the first local step warns",
    ),
]


def reason_of(name: str) -> str | None:
    """Why the test cannot apply, or None if it should pass."""
    return next((why for pattern, why in CANNOT_APPLY if re.search(pattern, name)), None)
