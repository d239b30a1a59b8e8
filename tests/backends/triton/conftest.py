"""Triton decides at import whether its kernels run under its interpreter, so those tests have a pytest of their own.

`test_interpreter.py` starts it; by hand: ``TRITON_INTERPRET=1 python -m pytest tests/backends/triton/interpreted``.
"""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
