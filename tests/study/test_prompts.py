from rankscope.lab.study.data import FIXED_TEXTS, Record, prompt


def test_with_input() -> None:
    assert prompt(Record(0, "Add them.", "1, 2", "3")) == (
        "Below is an instruction that describes a task, paired with an input that provides "
        "further context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd them.\n\n### Input:\n1, 2\n\n### Response:"
    )


def test_blank_input_leaves_the_section_out() -> None:
    expected = (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nSay hello.\n\n### Response:"
    )
    for blank in ("", " \n"):
        assert prompt(Record(0, "Say hello.", blank, "Hello.")) == expected


def test_fixed_texts_and_fields_make_up_the_prompt() -> None:
    left = prompt(Record(0, "INSTRUCTION", "INPUT", "OUTPUT"))
    for text in ("INSTRUCTION", "INPUT", *FIXED_TEXTS):
        left = left.replace(text, "", 1)
    assert left == ""
