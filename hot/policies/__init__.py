"""Policies: what a person writes, resolved into one plan per layer. Knows no backend."""
