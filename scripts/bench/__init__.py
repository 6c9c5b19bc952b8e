"""Measurements of what this library costs, on any machine: a script each. `docs/gpu.md` has what they found."""
