"""One rank of two whose two-sided link carries nothing: in a folder it leaves which transport the pair chose, and
why not the other."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import torch
    import torch.distributed as dist

    from bpipe.runtime.streams import copying_on
    from bpipe.transport import AUTO
    from bpipe.transport.connect import connect
    from bpipe.transport.distributed import Distributed

    def hang(*arguments: Any) -> Any:
        threading.Event().wait(120.0)

    Distributed._send = Distributed._receive = hang  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    connection, (link,) = connect([(0, 1)], AUTO, 6.0, copying_on(torch.device("cpu")))
    assert connection is not None
    left = {"transport": link.transport, "refused": dict(link.refused)}
    Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(left))
    connection.close()
    dist.destroy_process_group()
