"""One name for a parameter, whatever wraps the modules that hold it."""

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_name(name: str) -> str:
    """Return a parameter's name in the unwrapped model, from that of ``named_parameters``.

    It is the same before and after ``torch.compile``, activation checkpointing and FSDP.

    Example:
        >>> canonical_name("_orig_mod.layers.0._checkpoint_wrapped_module.up.weight")
        'layers.0.up.weight'
    """
    if "._" not in name and not name.startswith("_"):  # no wrapper's part
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
