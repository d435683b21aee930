"""Pictures of pages for docs/images, drawn by headless Chromium: `python -m tests.pictures PAGE OUT.png`.

After `F="--set ppo.updates=40 --set ppo.kl.control=fixed"`, these runs and commands make those of the docs:

    tether run tiny $F --set ppo.kl.coefficient=0 --set gates.policy.kl=1 --name "β cut, judged"
    python -m tests.pictures .tether/runs/JUDGED/report.html docs/images/report.png --height 900
    python -m tests.pictures LINK docs/images/review.png --width 860 --height 560 --key g

LINK is a rater's, from `tether people page RUN --rater NAME`; the key g folds the guidelines.
"""

import argparse
import subprocess
from pathlib import Path

from playwright.sync_api import ViewportSize, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 200_000
"""Bytes of a picture in the docs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", help="an address, or a file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--key", help="pressed before the picture is taken")
    asked = parser.parse_args()
    address = asked.page if "://" in asked.page else Path(asked.page).resolve().as_uri()
    chromium = subprocess.run(["sh", ROOT / "infra/chromium.sh"], capture_output=True, text=True, check=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.stdout.strip(), args=["--no-sandbox"])
        size = ViewportSize(width=asked.width, height=asked.height)
        page = browser.new_page(viewport=size, color_scheme="light", reduced_motion="reduce")
        page.goto(address, wait_until="load")
        if asked.key:
            page.keyboard.press(asked.key)
        page.wait_for_timeout(500)
        page.screenshot(path=asked.out)
        browser.close()
    if (found := asked.out.stat().st_size) > LARGEST:
        raise SystemExit(f"{asked.out} has {found:,} bytes; the docs' pictures have at most {LARGEST:,}.")


if __name__ == "__main__":
    main()
