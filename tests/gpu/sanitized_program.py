"""What compute-sanitizer runs on one GPU: ``phases``, or a mode of the kernel ``planted``."""

from __future__ import annotations

import sys

from nvep.errors import DeviceError
from nvep.runtime.cuda import CudaDevice
from nvep.testing.phase_by_phase import CASES, run_phase_by_phase
from tests.emulated import planted


def plant(mode: str) -> None:
    """Run the kernel; ``outside`` stores where nothing can be mapped, for which the tool may end the launch."""
    device = CudaDevice(0)
    memory = device.allocate(4 * planted.THREADS)
    try:
        planted.run(device, mode, words=0 if mode == "outside" else memory.address, flag=memory.address)
    except DeviceError:
        if mode != "outside":
            raise


if __name__ == "__main__":
    if sys.argv[1] == "phases":
        assert run_phase_by_phase(CASES, device="cuda") > 0
    else:
        plant(sys.argv[1])
