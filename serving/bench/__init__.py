"""Benchmarks of the engine's parts, and of the engine."""
