"""Operators with a plain reference, a fast CPU path and a Triton kernel each."""
