"""Text that others wrote: WordNet's glosses and Jane Austen's novels, both read from Debian packages.

`python sources.py FOLDER` fetches the packages `wordnet-base` and `r-cran-janeaustenr` (`apt-get download`), unpacks
them with `dpkg -x` and writes into FOLDER

- `glosses.json`: a list of `[word, part of speech, gloss, weight]`, the commonest sense of each chosen word;
- `novels.txt`: the six novels, paragraphs on one line each, a blank line between paragraphs;
- `COPYRIGHT.wordnet-base`, `COPYRIGHT.r-cran-janeaustenr`: the packages' notices, which travel with every copy.
"""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from engine import TOPICS
from tales import NOUNS

PACKAGES = ("wordnet-base", "r-cran-janeaustenr")

# Glosses that a tiny model had better not recite.
UNWANTED = re.compile(
    r"offensive|disparag|derogat|obscen|vulgar|slur|slang|sexual|genital|penis|vagin|coitus|copulat|intercourse"
    r"|prostitut|porn|erotic|lewd|negro|jew|nazi|slave|breast|vulva|anus|anal |excre|feces|urine|urinat|semen|suicid"
    r"|murder|kill|rape|homosexual|lesbian|ethnic|race |racial|caucasian|muslim|whore|buttocks|derision|contemptible",
    re.IGNORECASE,
)

# WordNet's lexicographer files of things that one can point at: animals, artefacts, body, food, objects, plants.
CONCRETE = {"05", "06", "08", "13", "17", "20"}


def fetch(folder: Path) -> Path:
    """Downloads and unpacks the Debian packages below `folder`; the root of the unpacked tree comes back."""
    root = folder / "root"
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def strings_of_rdb(data: bytes) -> Iterator[list[str]]:
    """The character vectors in an R lazy-load database (`.rdb`), one after the other.

    A chunk is the length of its contents (4 bytes, big-endian) and a zlib stream of R's XDR serialisation: `X\\n`,
    three version words, from version 3 on the name of the encoding, then the object. A character vector (type 16) is
    a count and that many strings (type 9), each with flags, a byte length and bytes.
    """
    while data:
        stream = zlib.decompressobj()
        body = stream.decompress(data[4:])
        if len(body) != struct.unpack(">i", data[:4])[0]:
            raise ValueError("a chunk is not as long as it says")
        data = stream.unused_data
        version = struct.unpack_from(">i", body, 2)[0]
        at = 14 + (4 + struct.unpack_from(">i", body, 14)[0] if version >= 3 else 0)
        flags, count = struct.unpack_from(">ii", body, at)
        if flags & 255 != 16:
            continue
        at += 8
        strings = []
        for _ in range(count):
            size = struct.unpack_from(">ii", body, at)[1]
            strings.append(body[at + 8 : at + 8 + size].decode())
            at += 8 + size
        yield strings


def paragraphs(lines: list[str]) -> Iterator[str]:
    """Joins the printed lines of a novel into paragraphs of plain characters; headings and rules are left out."""
    text = "\n".join(line.strip() for line in lines)
    text = text.translate({0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'", 0x2014: "--", 0xA3: "£"})
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = re.sub(r"\s+", " ", paragraph.replace("_", "")).strip()
        if len(paragraph) > 40 and not paragraph.isupper() and "Gutenberg" not in paragraph:
            yield paragraph


def sense_counts(path: Path) -> dict[tuple[str, str], int]:
    """How often WordNet's tagged texts use (word, part of speech), from `cntlist.rev`."""
    counts: dict[tuple[str, str], int] = {}
    for line in path.read_text().splitlines():
        key, _, count = line.split()
        word, _, sense = key.partition("%")
        kind = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}[sense[0]]
        counts[word, kind] = counts.get((word, kind), 0) + int(count)
    return counts


def glosses(folder: Path, wanted: set[str]) -> list[tuple[str, str, str, float]]:
    """(word, part of speech, gloss, weight) of common words, of concrete nouns and of the `wanted` nouns.

    The gloss is that of the first, commonest sense, without its examples. The weight grows with the root of the
    word's count, so that training sees the common words more often.
    """
    counts = sense_counts(folder / "cntlist.rev")
    ours = {
        name.split(" ")[-1] for name, _, _ in TOPICS if name.count(" ") < 2
    }  # here these words mean parts of the engine
    found = []
    for kind, least in (("noun", 2), ("verb", 6), ("adj", 5), ("adv", 8)):
        data = (folder / f"data.{kind}").read_bytes()
        for line in (folder / f"index.{kind}").read_text().splitlines():
            if line.startswith(" "):
                continue
            word, *rest = line.split()
            offset = int(rest[int(rest[2]) + 5])
            record = data[offset : data.index(b"\n", offset)].decode()
            fields, _, gloss = record.partition(" | ")
            lexicon = fields.split()[1]
            spelled = {lemma.split("(")[0] for lemma in fields.split()[4 : 4 + 2 * int(fields.split()[3], 16) : 2]}
            gloss = re.sub(r"\([^)]*\)", "", gloss.split('; "')[0].split(";")[0])
            gloss = re.sub(r"\s+", " ", gloss).replace(" ,", ",").strip(" ;:,")
            count = counts.get((word, kind), 0)
            if word in ours or word not in spelled or not re.fullmatch(r"[a-z]{3,}(_[a-z]{3,})?", word):
                continue
            if not 12 <= len(gloss) <= 140 or UNWANTED.search(gloss) or UNWANTED.search(word) or '"' in gloss:
                continue
            if kind == "noun" and word in wanted:
                weight = 12.0
            elif count >= least and "_" not in word:
                weight = min(float(count) ** 0.5, 12.0)
            elif kind == "noun" and lexicon in CONCRETE and ("_" not in word or count) and count + len(rest) > 7:
                weight = 1.0 if count else 0.3
            else:
                continue
            found.append((word.replace("_", " "), kind, gloss, round(weight, 2)))
    return found


def main(folder: Path) -> None:
    """Writes the sources into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        root = fetch(Path(scratch))
        library = root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
        novels = ["\n\n".join(paragraphs(lines)) for lines in strings_of_rdb(library.read_bytes())]
        table = glosses(root / "usr/share/wordnet", set(NOUNS))
        for package in PACKAGES:
            notice = (root / "usr/share/doc" / package / "copyright").read_text()
            (folder / f"COPYRIGHT.{package}").write_text(notice)
    (folder / "novels.txt").write_text("\n\n\n".join(novels) + "\n")
    (folder / "glosses.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in table) + "\n]\n")
    print(f"{len(novels)} novels, {sum(map(len, novels)):,} characters; {len(table):,} glosses")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
