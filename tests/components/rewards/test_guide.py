"""The examples of docs/guide/rewards.md work as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from components.ppo.config import PpoConfig
from components.rewards.config import FunctionReward, HttpReward
from components.rewards.function import FunctionSource
from components.rewards.http import HttpSource
from components.rewards.source import Replies

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "rewards.md").read_text()
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("yaml", "python")}
TWO = Replies([[{"role": "user", "content": "q"}]] * 2, ["a b", "c"], [{}] * 2)


def test_the_example_of_a_list_is_one() -> None:
    found = PpoConfig(rewards=yaml.safe_load(BLOCKS["yaml"][0])["ppo"]["rewards"], kl={"control": "fixed"}).rewards
    assert found is not None and [each.name for each in found] == ["pipeline", "brief", "number", "http", "outsider"]


def test_the_function_and_the_scorer_of_the_guide_score(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(BLOCKS["python"][0])
    function = FunctionSource(FunctionReward(source="function:my_rewards:brief", root=str(tmp_path)))
    assert function.score(TWO) == [-2.0, -1.0]
    function.close()
    text = BLOCKS["python"][1].replace(
        'HTTPServer(("127.0.0.1", 8000), Scorer).serve_forever()',
        'server = HTTPServer(("127.0.0.1", 0), Scorer)\nprint(server.server_port, flush=True)\nserver.serve_forever()',
    )
    (tmp_path / "scorer.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, "scorer.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            source = HttpSource(HttpReward(source=f"http:http://127.0.0.1:{int(process.stdout.readline())}/score"))
            assert (source.version(), source.score(TWO)) == ("1", [-3.0, -1.0])
            source.close()
        finally:
            process.kill()
