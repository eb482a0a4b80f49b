#!/usr/bin/env python3
"""What transformers makes of the sentences in tests/data/minilm: the reference for torch_engine.

    transformers_reference.py --model FOLDER --output FILE            the embeddings of a model that is there
    transformers_reference.py --new_model FOLDER --output FILE        of a model of the same shape with random weights,
                                                                      which is written to FOLDER first
    transformers_reference.py --model FOLDER --tokenize               also makes the token ids anew, with its tokenizer

Needs torch and transformers; a GPU is not used. The output is what `torch_engine --inputs FILE` reads.
"""

import argparse
import json
import pathlib

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

SENTENCES = pathlib.Path(__file__).resolve().parent.parent / "data/minilm/sentences.json"


def new_model(folder):
    """The shape of all-MiniLM-L6-v2; weights as BertModel draws them, wide enough apart to give distinct embeddings."""
    torch.manual_seed(1)
    model = BertModel(BertConfig(vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
                                 intermediate_size=1536, initializer_range=0.1))
    model.save_pretrained(folder)


def embed(model, input_ids, attention_mask):
    """Mean pooling over the tokens of each sentence, then length one, as sentence-transformers does."""
    with torch.inference_mode():
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, p=2, dim=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model")
    source.add_argument("--new_model")
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokenize", action="store_true")
    flags = parser.parse_args()
    if flags.new_model:
        new_model(flags.new_model)
    folder = flags.model or flags.new_model

    inputs = json.loads(SENTENCES.read_text())
    if flags.tokenize:
        tokens = AutoTokenizer.from_pretrained(folder)(inputs["sentences"], padding=True)
        inputs["input_ids"], inputs["attention_mask"] = tokens["input_ids"], tokens["attention_mask"]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    embeddings = embed(model, torch.tensor(inputs["input_ids"]), torch.tensor(inputs["attention_mask"]))
    inputs["embeddings"] = [[round(value, 7) for value in row] for row in embeddings.tolist()]
    lines = [f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in value) + "\n]" for key, value in inputs.items()]
    pathlib.Path(flags.output).write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
