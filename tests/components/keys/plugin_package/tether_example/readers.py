"""A reader of data files: `data.readers={.chat: chat_log}`. A line is `prompt | chosen | rejected`."""


def read(path):
    """Return the rows of the file, one dictionary each."""
    for line in path.read_text(encoding="utf-8").splitlines():
        prompt, chosen, rejected = (part.strip() for part in line.split("|"))
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
