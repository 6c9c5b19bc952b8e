"""What a run's record says about its device."""

import pytest

from bpipe.predict.cluster import DEVICES
from bpipe.runtime.run_record import peak_of


@pytest.mark.parametrize(
    ("name", "device"),
    [("NVIDIA A100-SXM4-40GB", "a100-40g"), ("NVIDIA H100 80GB HBM3", "h100-80g"), ("NVIDIA H20", "h20-96g")],
)
def test_the_peak_of_a_known_device_is_its_tables(name: str, device: str) -> None:
    """Devices are recognised by name: two may have equally large memories."""
    assert peak_of(name, None)[0] == DEVICES[device].peak_flops_per_s
    assert peak_of("cpu", None) == (None, None)
