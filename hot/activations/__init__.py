"""Other ops than linear layers and convolutions, with less to save: forward as torch has it, backward from codes or bits.

    fused        activations and norms: a backward of their own, straight from codes
    recomputed   ops that run again on the values of codes
    bits         ops that need a bit an element: exact

`calls` finds the calls, by torch's function modes; so norms and attention inside foreign modules are served too.
"""

from hot.activations.calls import saving, unwatched
from hot.activations.modules import kept_whole

__all__ = ["kept_whole", "saving", "unwatched"]
