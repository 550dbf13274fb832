"""A Trainer script whose two ranks share each sequence, by accelerate's Ulysses.

On CPU ranks it needs autotune: under plain torchrun accelerate 1.15 prepares Ulysses before DeepSpeed's communication is started.
"""

import torch
import torch.distributed
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments, set_seed


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.randint(1, 512, (32,), generator=torch.Generator().manual_seed(at))


def collate(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.stack(items)
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(32).expand(len(items), -1)}


def main() -> None:
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    shares = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    words = vars(HfArgumentParser(TrainingArguments).parse_args())
    args = TrainingArguments(**{**words, "parallelism_config": shares})
    set_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=4)
    trainer = Trainer(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), args, collate, Texts())
    trainer.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
