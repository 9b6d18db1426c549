"""The words of the answer in other languages: headings, verdicts and what stands between the findings.

The English text is the key, and what a judge has measured stays as it is. Titles of failures stand in the registry.
"""

from collections.abc import Callable

_CHINESE = {
    # verdicts
    "NAMED": "确定", "SUSPECTED": "怀疑", "FOUND": "测到", "HELD": "无此故障", "NOT CHECKED": "未检查",
    "DOES NOT APPLY": "不适用",
    # headings
    "HELD: looked for, and not there (in brackets: the same measurement with the failure put in on purpose)":
        "无此故障：找过，没有（括号内：故意放入这个故障时，同样的测量得到什么）",
    "HELD, with the repairs above: looked for, and not there (in brackets: the same measurement with the failure put "
    "in on purpose)":
        "加上上面的改法之后，无此故障：找过，没有（括号内：故意放入这个故障时，同样的测量得到什么）",
    "(the edit takes out {} lines, see below)": "（这个改法去掉 {} 行，见下面）",
    "IN FULL": "完整内容", ", and beside these: {}": "，此外还有：{}",
    "Cut: {}.": "裁掉的：{}。", "Note: {}.": "注意：{}。", "ERROR {}": "错误：{}",
    "what these releases have in some settings (docs/atlas.md): {}":
        "这些版本在某些设置下有的故障（docs/atlas.md）：{}",
    # of one finding
    "{}; with this repair: {} (tried)": "{}；加上这个改法：{}（试过）",
    "{}; tried beside it: {}": "{}；另外试过：{}", "not named: {}": "为什么只是怀疑：{}",
    "repair: {}": "改法：{}", "repair (tried): {}": "改法（试过）：{}", "why: {}": "原因：{}",
    "line {}": "第 {} 行", "cell {}, line {}": "单元格 {}，第 {} 行",
    # the chain
    "{} ends the run": "{} 让训练报错停下", "{} shows, which the first run hid": "{} 出现了，第一次运行把它盖住了",
    "with it repaired, {}": "改好之后，{}", "with both repaired, {}": "两个都改好之后，{}",
    "with these repaired, {}": "这些都改好之后，{}", "with all repaired, {}": "全部改好之后，{}",
    "the script ends in an error: {}": "脚本报错停下：{}", "{} is suspected": "怀疑有 {}",
    "nothing is found": "没有发现", "In turn: {}.": "依次：{}。",
    # the last line
    "{}: {}": "{}：{}", "{} named ({})": "确定 {} 个（{}）", "{} suspected ({})": "怀疑 {} 个（{}）",
    "; the script ended in an error too.": "；脚本还报错停下了。", "could not be judged.": "没法检查。",
    "nothing found; {} held": "没有发现；{} 个测量过，没有", ", {} not checked ({})": "，{} 个没有检查（{}）",
    ", {} do not apply": "，{} 个不适用", ".": "。", ", ": "，",
    # the table of rewards
    "form": "格式", "completion": "completion（回答）", "right": "对", "wrong": "错", "other": "其他", "none": "无答案",
    "and {} more completions (--json has all)": "还有 {} 个 completion（--json 里有全部）",
    # names and titles that the registry has not
    "missing name": "没有的名字", "wrong argument": "参数不对", "override": "重写", "callback": "回调",
    "prompts and answers": "提示与答案",
    "Prompts and answers that do not belong together": "提示和答案对不上",
    "evaluation": "评估", "checkpoint": "检查点",
    "loss's options": "损失的选项", "weights": "权重",
    "learning rate": "学习率", "one prompt": "只有一条", "untrained model": "未训练的模型",
    "A name that the installed release does not have": "安装的版本里没有的名字",
    "What the trainer is given is not what it takes": "传给 trainer 的东西不是它要的",
    "An override that changes nothing": "重写了方法，结果却没有变",
    "A callback of the script's that raises, stops the training or undoes it":
        "脚本自己的回调（callback）报错、让训练停下，或者抵消训练",
    "An evaluation that cannot be made, or chooses otherwise": "无法进行的评估，或者选错的评估",
    "Weights that the model does not take, or that are not the trained ones":
        "模型没有接收的权重，或者不是训练出来的权重",
    "A checkpoint that training cannot go on from": "无法从中继续训练的检查点（checkpoint）",
    "Arguments that leave no gradient, turn it, or plan no step": "参数让损失没有梯度、方向相反，或者一步也不训练",
    "A learning rate that cannot teach, or teaches too much": "学习率太小学不动，或者太大",
    "One prompt to train on": "只有一条 prompt",
    "What the untrained model gets": "还没训练的模型得到多少奖励",
}  # fmt: skip
LANGUAGES: dict[str, dict[str, str]] = {"en": {}, "zh": _CHINESE}


def speak(language: str) -> Callable[..., str]:
    """Return what says an English text in a language, with values in the places of its `{}`."""
    texts = LANGUAGES[language]

    def say(text: str, *values: object) -> str:
        said = texts.get(text, text)
        return said.format(*values) if values else said

    return say
