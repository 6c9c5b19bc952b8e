"""Measurements of what this library costs, on any machine: a script each. `docs/performance.md` has what they found."""
