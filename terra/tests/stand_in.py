"""A function that stands in for one of torch's."""

from typing import Any

import torch


def tensor(*args: Any) -> torch.Tensor:
    return torch.tensor(*args)
