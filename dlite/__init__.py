"""Speculative decoding for LLM agents: trained and retrieved drafts, verified losslessly."""

__version__ = "0.1.0"
