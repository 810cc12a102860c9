"""An ordinary script with TRL's ``GRPOTrainer``, whose rollouts come from an engine of its own.

The engine holds the model in another precision. On rank 1 it gets no new weights any more from the
step on that the environment names in ``STALE_FROM``.
"""

import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from tiny_llama import NUM_TOKENS, make_model
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import HfArgumentParser, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LONGEST = 8


def make_tokenizer():
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(NUM_TOKENS)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2", unk_token="w1")


def make_data():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(3, NUM_TOKENS, (96, 4), generator=generator).tolist()
    return Dataset.from_list([{"prompt": " ".join(f"w{n}" for n in row)} for row in drawn])


def large_tokens(completions, **_):
    """A reward that the model can earn: the larger the tokens, the better."""
    return [sum(int(word[1:]) for word in text.split()) / NUM_TOKENS for text in completions]


class Engine:
    """Draws completions with a copy of the model, and says how probable each token was."""

    def __init__(self, rank, stale_from):
        self.rank, self.stale_from = rank, stale_from
        self.generator = torch.Generator().manual_seed(rank)
        self.model = make_model().bfloat16().eval()
        self.gaps = []
        """The mean gap to the trainer's log-probabilities of each rollout, computed one by one."""

    @torch.no_grad()
    def __call__(self, prompts, trainer):
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if self.rank != 1 or trainer.state.global_step < self.stale_from:
            self.model.load_state_dict(policy.state_dict())
        ids = [[int(word[1:]) for word in prompt.split()] for prompt in prompts]
        drawn = [self._draw(each) for each in ids]
        self.gaps.append(self._gap(policy, ids, drawn))
        completions, logps = zip(*drawn, strict=True)
        return {"prompt_ids": ids, "completion_ids": list(completions), "logprobs": list(logps)}

    def _draw(self, prompt):
        length = int(torch.randint(3, LONGEST + 1, (), generator=self.generator))
        tokens, logps = list(prompt), []
        for _ in range(length):
            logits = self.model(torch.tensor([tokens])).logits[0, -1].float()
            next_logps = logits.log_softmax(0)
            token = int(torch.multinomial(next_logps.exp(), 1, generator=self.generator))
            tokens.append(token)
            logps.append(float(next_logps[token]))
        return tokens[len(prompt) :], logps

    def _gap(self, policy, prompts, drawn):
        apart = []
        for prompt, (tokens, logps) in zip(prompts, drawn, strict=True):
            logits = policy(torch.tensor([prompt + tokens])).logits[0].double()
            own = logits[len(prompt) - 1 : -1].log_softmax(-1)
            apart += [abs(float(own[at, token]) - logps[at]) for at, token in enumerate(tokens)]
        return sum(apart) / len(apart)


def main():
    torch.set_num_threads(1)
    [settings] = HfArgumentParser(GRPOConfig).parse_args_into_dataclasses()
    engine = Engine(settings.process_index, int(os.environ["STALE_FROM"]))
    trainer = GRPOTrainer(
        make_model(),
        large_tokens,
        args=settings,
        train_dataset=make_data(),
        processing_class=make_tokenizer(),
        rollout_func=engine,
    )
    trainer.train()
    output = Path(settings.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / f"gaps {settings.process_index}").write_text(json.dumps(engine.gaps))


if __name__ == "__main__":
    main()
