"""Silences exactly the warnings that Megatron-Core and torch give on every run and that no user can act
on."""

from __future__ import annotations

import logging
import warnings

_KNOWN = (
    "Apex is not installed",  # optional kernels for a GPU
    "(Transformer Engine|transformer_engine|TransformerEngine) .*not (installed|found)",
    "MimoModelConfig is experimental",  # imported by Megatron itself, used by nobody here
    "full scope is deprecated",  # a default of Megatron's own TransformerConfig
    "The .grad attribute of a Tensor that is not a leaf",  # Megatron's optimizer looks at its own shards
    "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",  # called by Megatron
)


def silence_known_warnings() -> None:
    """For the life of the process. Everything else is shown as ever."""
    for message in _KNOWN:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    # Megatron imports it; it remarks on a machine that has the CUDA compiler and no device.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
