"""Data sets → rows → token ids with labels.

Two formats. `qa`: a question and an answer, rendered with the target's chat template where it has one and a plain
template otherwise; only the answer, its end token included, is learnt and scored. `text`: documents, cut into chunks;
every token is learnt. Sources are whatever `datasets` reads: a Hub id, a folder in Hub layout, or a file.
"""

from msa_lite.data.examples import encode, encode_qa, encode_text, encode_up_to, make_collator, pad_id
from msa_lite.data.kept import kept_head, kept_texts
from msa_lite.data.prompts import DATE_STRING, IGNORE, Example, Prompter, Shots, Template, check_vocabulary
from msa_lite.data.rows import Row, load_rows, rows_identity, sample_rows, split_rows, stream_texts
from msa_lite.data.sources import DataSource, is_remote_data, load_table, pin_source, stream_table
from msa_lite.data.tokenizers import MOST_ROWS, check_same_ids, open_tokenizer

__all__ = [
    "DATE_STRING",
    "IGNORE",
    "MOST_ROWS",
    "DataSource",
    "Example",
    "Prompter",
    "Row",
    "Shots",
    "Template",
    "check_same_ids",
    "check_vocabulary",
    "encode",
    "encode_qa",
    "encode_text",
    "encode_up_to",
    "is_remote_data",
    "kept_head",
    "kept_texts",
    "load_rows",
    "load_table",
    "make_collator",
    "open_tokenizer",
    "pad_id",
    "pin_source",
    "rows_identity",
    "sample_rows",
    "split_rows",
    "stream_table",
    "stream_texts",
]
