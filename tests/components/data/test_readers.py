import gzip
import json
import tarfile
from itertools import islice

import pytest

from components.base.errors import UserError
from components.data.readers import read_source

ROWS = [{"prompt": f"p{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def contents(path):
    return [(row.number, row.data) for row in read_source(path)]


def test_the_same_rows_come_from_every_kind_of_file(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    (tmp_path / "a.jsonl").write_text(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "without a suffix").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES.encode())
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "lines.json").write_text(LINES)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    of_rows = ("a.jsonl", "a.jsonl.gz", "without a suffix", "marked.jsonl", "a.json", "lines.json", "a.parquet")
    for name in of_rows:
        assert contents(tmp_path / name) == list(enumerate(ROWS, 1)), name
    for name in ("a.csv", "a.tsv"):
        assert contents(tmp_path / name) == list(enumerate(ROWS, 2)), name


def test_a_csv_cell_may_hold_line_breaks_and_messages(tmp_path):
    (tmp_path / "a.csv").write_text(
        'prompt,chosen\r\n"two\nlines","[{""role"": ""user"", ""content"": ""x""}]"\r\nb,[1]\r\n'
    )
    assert contents(tmp_path / "a.csv") == [
        (2, {"prompt": "two\nlines", "chosen": [{"role": "user", "content": "x"}]}),
        (3, {"prompt": "b", "chosen": "[1]"}),
    ]


def test_a_csv_row_with_too_few_cells_is_a_bad_row_with_its_number(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen\na,b\nc\n")
    rows = list(read_source(tmp_path / "a.csv"))
    assert [(row.number, row.problem and row.problem.text) for row in rows] == [
        (2, None),
        (3, "1 cell, the header has 2"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "bad JSON"),
        (b"[1]", "expected an object"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b"[" * 100_000, "bad JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "bad JSON"),
    ],
)
def test_a_bad_line_among_good_ones_comes_out_with_its_problem(tmp_path, line, reason):
    (tmp_path / "a.jsonl").write_bytes(LINES.encode() + line + b"\n" + LINES.encode())
    rows = list(read_source(tmp_path / "a.jsonl"))
    assert [row.number for row in rows if row.problem] == [4]
    assert rows[3].problem.check == "readable" and reason in rows[3].problem.text
    assert len(rows) == 7


def test_a_truncated_gzip_says_after_which_row_it_broke_off(tmp_path):
    many = "".join(json.dumps({"n": i, "noise": str(hash((i, "x")))}) + "\n" for i in range(5000))
    packed = gzip.compress(many.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    rows = []
    with pytest.raises(UserError, match=r"a\.jsonl\.gz breaks off after row \d+:") as error:
        for row in read_source(tmp_path / "a.jsonl.gz"):
            rows.append(row.number)
    said = int(str(error.value).split("after row ")[1].split(":")[0])
    assert 1000 < said < 5000 and rows == list(range(1, said + 1))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        *((name, b"", "is empty") for name in ("a.jsonl", "a.csv", "a.parquet", "a.jsonl.gz", "a")),
        ("a.jsonl", b"\n \n", "holds no row"),
        ("a.csv", b"prompt,chosen\n", "holds no row"),
        ("a.csv", b"prompt,chosen\n,\n", "holds no row"),
        ("a.json", b"[]", "holds no row"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "holds no row"),
        ("a.jsonl.gz", LINES.encode(), "can't be read at all"),
        ("a.jsonl", b"hello\nworld\n", "is a JSON object; line 1"),
        ("a.jsonl", b"[1]\n[2]\n", "is a JSON object; line 1"),
        ("a.jsonl", b'{"score": NaN}\n', r"is a JSON object.*NaN is not a JSON value: write null.*Correct its lines"),
        ("a.parquet", b"PAR1 no", "can't be read at all"),
        ("a.json", b'[{"a": 1}', "is not JSON"),
        ("a.txt", b"hello", "is not in a format that Tether reads"),
        ("a.csv", b"prompt,prompt\na,b\n", "names a column twice"),
        ("a.csv", b'prompt,"chosen,rejected\nq,x,y\n', "not valid CSV at row 1 .*a quotation mark is not closed"),
    ],
)
def test_a_file_without_readable_rows_is_refused_by_name(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} .*{told}"):
        list(read_source(tmp_path / name))


def test_a_damaged_byte_inside_a_gzip_is_the_users_error(tmp_path):
    packed = bytearray(gzip.compress(LINES.encode() * 200))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    with pytest.raises(UserError, match="cut short or damaged"):
        list(read_source(tmp_path / "a.jsonl.gz"))


def test_reading_the_first_rows_reads_no_further(tmp_path):
    packed = gzip.compress((LINES * 50_000).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) - 20])
    assert len(list(islice(read_source(tmp_path / "a.jsonl.gz"), 5))) == 5


def test_rows_of_blank_cells_as_spreadsheets_append_them_are_skipped_as_blank_lines_are(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,chosen\n,\na,b\n\n , \nc,\n,,,\n"",\n')
    assert contents(tmp_path / "a.csv") == [(3, {"prompt": "a", "chosen": "b"}), (6, {"prompt": "c", "chosen": None})]
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a"}\n \n')
    assert contents(tmp_path / "a.jsonl") == [(2, {"prompt": "a"})]


def test_nameless_columns_that_a_spreadsheet_adds_are_left_out_and_text_in_one_is_an_error_of_its_row(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,, ,\na,b,,,\nc,d, ,,\ne,f,,g,\n")
    *good, bad = read_source(tmp_path / "a.csv")
    assert [(row.number, row.data) for row in good] == [
        (2, {"prompt": "a", "chosen": "b"}),
        (3, {"prompt": "c", "chosen": "d"}),
    ]
    assert bad.number == 4 and bad.problem is not None
    assert bad.problem.text.startswith("column 4 has no name in the header and holds 'g'")
    (tmp_path / "a.csv").write_text(",prompt,chosen,\n0,a,b,\n1,c,d,\n")
    assert contents(tmp_path / "a.csv")[1] == (3, {"": "1", "prompt": "c", "chosen": "d"}), "the index of pandas"


def test_an_apostrophe_is_one_of_the_text_but_in_rows_that_tether_wrote_for_labelling(tmp_path):
    (tmp_path / "a.csv").write_text('id,a,b\n7,\'=1,\'tis\ntether-00001-x,\'=1,"\'[""x""]"\n')
    assert [data for _, data in contents(tmp_path / "a.csv")] == [
        {"id": "7", "a": "'=1", "b": "'tis"},
        {"id": "tether-00001-x", "a": "=1", "b": '["x"]'},
    ]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        *((f"prompt{mark}chosen\r\na, b{mark}c\r\n", {"prompt": "a, b", "chosen": "c"}) for mark in ";\t|"),
        *((f'"prompt, asked"{mark}chosen\nq, please{mark}x\n', {"prompt, asked": "q, please", "chosen": "x"})
          for mark in ";\t"),
        *((f"{first}\r\nprompt;chosen\r\np, q;a\r\n", {"prompt": "p, q", "chosen": "a"})
          for first in ("sep=;", '"sep=;"', "\ufeffsep=;", "SEP=;")),
    ],
)  # fmt: skip
def test_the_delimiter_of_a_csv_is_that_of_its_header(tmp_path, text, row):
    (tmp_path / "a.csv").write_bytes(text.encode())
    assert contents(tmp_path / "a.csv") == [(2, row)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_a_text_of_another_unicode_encoding_is_refused_by_its_name(tmp_path, name, encoding):
    text = {"rows.csv": "prompt,a\nx,y\n", "rows.jsonl": '{"a": 1}\n', "rows.json": '[{"a": 1}]'}[name]
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(UserError, match=rf"{name} is in UTF-16 or UTF-32, and Tether reads UTF-8"):
        list(read_source(tmp_path / name))


def test_messages_that_pandas_wrote_into_a_csv_are_no_text(tmp_path):
    cell = "[{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'It's me'}]"
    (tmp_path / "rows.csv").write_text(f'prompt,chosen\nx,"{cell}"\nx,"[{{\'a\': 1}}] is a list"\n')
    bad, good = read_source(tmp_path / "rows.csv")
    assert bad.problem is not None and "column `chosen` is a list as Python prints it" in bad.problem.text
    assert good.problem is None and good.data["chosen"] == "[{'a': 1}] is a list"


@pytest.mark.parametrize("bad", ['q4,"x4,y4', 'q4,"she said "no" to me",y4', 'q4,"x4","y4""'])
@pytest.mark.parametrize("later", ["q7,x7,y7", 'q7,"x, 7",y7', 'q7,x7,"y\n7"'])
def test_a_row_of_csv_with_an_open_quotation_mark_takes_no_other_row_with_it(tmp_path, bad, later):
    """Such a row held all lines up to the next quotation mark, or to the end of the file, as one cell."""
    lines = [f"q{n},x{n},y{n}" for n in range(9)]
    lines[4], lines[7] = bad, later
    (tmp_path / "x.csv").write_text("prompt,chosen,rejected\n" + "\n".join(lines) + "\n")
    rows = list(read_source(tmp_path / "x.csv"))
    assert [row.number for row in rows] == list(range(2, 11))
    assert [row.number for row in rows if row.problem] == [6]
    assert rows[4].problem[0] == "readable" and "quotation mark" in rows[4].problem[1] and rows[4].data == {"raw": bad}
    assert [row.data["prompt"] for row in rows if not row.problem] == [f"q{n}" for n in range(9) if n != 4]


@pytest.mark.parametrize(
    "header",
    ["prompt, chosen, rejected", '"prompt", "chosen", "rejected"', "prompt,chosen,rejected"],
)
def test_blanks_after_commas_are_no_part_of_a_cell(tmp_path, header):
    path = tmp_path / "rows.csv"
    path.write_text(f'{header}\n"p, q", "a, b", "c"\n"r", "d", "e"\n')
    assert contents(path)[0] == (2, {"prompt": "p, q", "chosen": "a, b", "rejected": "c"})
    path.write_text(f'{header}\n"p\nq", "a", "b"\n')
    assert contents(path) == [(2, {"prompt": "p\nq", "chosen": "a", "rejected": "b"})]
    path.write_text(f'{header}\np,q,r\n"p", "a", "b"\n')
    assert contents(path)[1] == (3, {"prompt": "p", "chosen": "a", "rejected": "b"})
    path.write_text("prompt,chosen,rejected\np, a,b\n")
    assert contents(path) == [(2, {"prompt": "p", "chosen": " a", "rejected": "b"})]


@pytest.mark.parametrize(
    ("start", "command"),
    [
        (b"\x28\xb5\x2f\xfd", "zstd -dc <"), (b"BZh9", "bunzip2 -c <"), (b"\xfd7zXZ\0", "unxz -c <"),
        (b"PK\3\4", "unzip"), (b"ARROW1\0\0", "Write it as Parquet"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rows.jsonl.zst", "my rows.jsonl", "rows.csv", "rows"])
def test_a_packed_file_is_refused_with_the_command_that_unpacks_it(tmp_path, start, command, name):
    (tmp_path / name).write_bytes(start + bytes(40))
    with pytest.raises(UserError, match=command) as error:
        contents(tmp_path / name)
    assert name in str(error.value)


@pytest.mark.parametrize("name", ["rows.tar", "rows.tar.gz", "rows.tgz"])
def test_a_tar_archive_is_refused_with_what_to_do(tmp_path, name):
    (tmp_path / "rows.jsonl").write_text(LINES)
    with tarfile.open(tmp_path / name, "w" if name == "rows.tar" else "w:gz") as archive:
        archive.add(tmp_path / "rows.jsonl", "rows.jsonl")
    with pytest.raises(UserError, match=rf"{name} is not in a format.*Unpack it if it is an archive"):
        contents(tmp_path / name)
