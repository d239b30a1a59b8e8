"""Write the golden tables anew: ``python tests/policies/regenerate_plans.py``; then read their diff."""

from conftest import Model
from test_presets import PLANS, preset_names, table

for name in preset_names():
    (PLANS / f"{name}.txt").write_text(table(name, Model()))
