"""The program that starts a stage's ranks on this host and ends them together, by torch's elastic agent.

python -m components.distributed.agent FOLDER PARENT
"""

import json
import os
import sys
from pathlib import Path

from components.base.files import replacing
from components.distributed.entry import AGENT
from components.distributed.hosts import Hosts
from components.distributed.orphans import die_with_parent

DIED = "died.json"
STARTED_TOGETHER_SECONDS = 900
"""Seconds that the first of several hosts waits for the others."""
WAITING_SECONDS = 14 * 24 * 3600
"""Seconds that another host waits for the first one, which may compute other stages before. (torch's stores count
milliseconds in 32 bits.)"""


def main(folder: Path) -> None:
    """Run the ranks of `folder`/agent.json to their end. If one failed, write exit codes to `died.json` and exit 1."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    wanted = json.loads((folder / AGENT).read_text(encoding="utf-8"))
    hosts = Hosts(**wanted["hosts"])
    alone = hosts.count == 1
    patience = WAITING_SECONDS if hosts.number else STARTED_TOGETHER_SECONDS
    config = LaunchConfig(
        min_nodes=hosts.count,
        max_nodes=hosts.count,
        nproc_per_node=wanted["ranks_here"],
        run_id="tether",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint=hosts.rendezvous,
        rdzv_configs={"timeout": patience} | ({} if alone else {"rank": hosts.number}),
        local_addr="127.0.0.1" if alone else None,
        max_restarts=0,  # a stage continues from its checkpoint when it is computed again
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "components.distributed.entry", str(folder), str(os.getpid()))
    except ChildFailedError as error:
        with replacing(folder / DIED) as temporary:
            temporary.write_text(json.dumps({rank: failure.exitcode for rank, failure in error.failures.items()}))
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    main(Path(sys.argv[1]))
