"""Find the data files that a config names, and read their first rows."""

import os
from pathlib import Path

from components.base.errors import UserError, about
from components.data.hub import hub_commit, resolve_source
from components.data.inputs import JUDGE, KINDS, SUITE, input_names, refuse_same_bytes, values_of
from components.data.readers import read_source
from data_contracts.config import JudgeData, of_judge
from data_contracts.expectations.own import load_suite
from data_contracts.rows.gather import look_at
from data_contracts.rows.reading_report import first_rows
from flows.config.run_config import RunConfig
from tasks.result import Input


def find_files(kind: str, config: RunConfig, home: Path) -> dict[str, Input]:
    """Return the files that `data.KIND` of the config names, by input.

    Raises:
        UserError: a file is missing or can't be read, or two hold the same bytes.
    """
    sources: list[Input] = []
    hub = None if kind == SUITE else config.data.hub
    for value in values_of(getattr(config.data, kind)):
        path = resolve_source(value, hub, home / "datasets", f"data.{kind}")
        with about(f"data.{kind}"):
            if kind in (*KINDS, JUDGE):
                first_rows(path, config.data, f"data.{kind}: ")  # refuses a rating sheet
                if kind == JUDGE:
                    try:
                        look_at("preferences", path, JudgeData.model_validate(config.data))
                    except UserError as error:
                        raise UserError(of_judge(error)) from error
                else:
                    look_at(kind, path, config.data)
            elif kind == SUITE:
                load_suite(path)
            else:
                next(iter(read_source(path, config.data.hub.split, config.data.readers)))
            sources.append(Input.of(path).model_copy(update={"hub": hub_commit(value, path)}))
    digests = [source.digest for source in sources]
    refuse_same_bytes(kind, [source.path for source in sources], digests)
    paths = [Path(os.path.abspath(source.path)) for source in sources]
    return dict(zip(input_names(kind, paths, digests), sources, strict=True))
