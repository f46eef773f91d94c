"""Data sets → rows → token ids with labels.

Two formats. `qa`: questions and answers, also as conversations, rendered with the target's chat template, or with a
plain template where it has none. Models learn, and are scored on, only the answers with their end token. `text`:
documents, cut into chunks; models learn every token. Sources are a Hub id, a folder in Hub layout, or a file.
"""

from msa_lite.data.chat import DATE_STRING, render_chat
from msa_lite.data.examples import (
    encode,
    encode_qa,
    encode_text,
    encode_up_to,
    group_rows,
    hash_ids,
    name_rows,
    pad_id,
    pass_tokens,
    shorten,
    to_batch,
)
from msa_lite.data.messages import NO_TOOLS
from msa_lite.data.prompts import IGNORE, SYSTEM_PROMPT, Example, Prompter, Shots, make_prompter
from msa_lite.data.rows import (
    Row,
    kept_head,
    kept_texts,
    load_rows,
    rows_identity,
    sample_rows,
    split_rows,
    stream_texts,
)
from msa_lite.data.sources import is_remote_data, load_table, pin_source, stream_table
from msa_lite.data.tokenizers import (
    COMPARED_ROWS,
    added_ids,
    best_score,
    check_same_ids,
    check_vocabulary,
    cut_text,
    decode_answer,
    decode_part,
    encode_next,
    encode_start,
    open_tokenizer,
    special_names,
    without_special,
)
from msa_lite.settings import DataSource, PromptSettings, Template, Thinking
