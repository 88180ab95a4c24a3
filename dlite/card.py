"""The model card of a checkpoint: what it is for and the exact commands that use it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from dlite.layouts import TAP_RULE
from dlite.model.config import DraftConfig


def model_card(config: DraftConfig, stored: dict[str, Any]) -> str:
    """README.md of a checkpoint. `stored` is its `config.json`."""
    record, training = stored["target"], stored["training"]
    name = record["name"] if record else "TARGET"
    command = training.get("command")
    trained = f"```bash\n{command}\n```\n\n" if command else ""
    vocabulary = f"{config.num_draft_ids} of {config.vocab_size} target ids"
    return f"""---
library_name: dlite
base_model: {json.dumps(name)}
tags:
- speculative-decoding
- draft-model
---

# Draft model for {name}

A draft model for speculative decoding with dlite: it proposes up to {config.num_draft_tokens}
tokens, the target verifies them, and the output stays the target's own. It works with this target
and its tokenizer only; neither is in this folder.

## Use

```bash
DRAFT=path/to/this/folder
dlite generate {shlex.quote(name)} --draft $DRAFT --prompt "Why is the sky blue?"
```

Accepted tokens per round, in a clone of the dlite repository (one `{{"turns": ["..."]}}` a line in
the suite):

```bash
python -m eval.acceptance draft=$DRAFT target={shlex.quote(name)} suite=questions.jsonl \\
    drafter=dlite,ngram out=results/acceptance
```

## How it was trained

{trained}```json
{json.dumps(training, indent=2)}
```

## What it reads and writes

| | |
|---|---|
| target | {_target_line(record)} |
| context, composition, head | {config.context}, {config.composition}, {config.head} |
| tapped layers | {", ".join(map(str, config.tap_ids))}: {TAP_RULE} |
| draft tokens K | {config.num_draft_tokens} |
| placeholder | {_placeholder(config)} |
| draft vocabulary | {vocabulary} |
| rank R | {config.rank} |
| rope theta | {config.rope_theta} |
| chat-template arguments | `{json.dumps(stored["template_kwargs"])}` |
| written by | dlite {stored["dlite_version"]}, {stored["dtype"]} |

"""


def _target_line(record: dict[str, Any] | None) -> str:
    if record is None:
        return "unknown (imported from a layout that does not state it)"
    prints = ", ".join(f"{key} `{record[key]}`" for key in ("architecture", "weights", "tokenizer"))
    return f"{record['family']}, {record['num_layers']} layers; fingerprints: {prints}"


def _placeholder(config: DraftConfig) -> str:
    if config.mask_token_id is None:
        return "a learned vector"
    return f"the target's embedding of id {config.mask_token_id}"
