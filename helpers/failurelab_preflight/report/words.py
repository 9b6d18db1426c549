"""The words of the answer in other languages: headings, verdicts and what stands between the findings.

The English text is the key, and what a judge has measured stays as it is. Titles of failures stand in the registry.
"""

from collections.abc import Callable

_CHINESE = {
    # verdicts
    "NAMED": "确定", "NOTED": "提示", "SUSPECTED": "怀疑", "FOUND": "测到", "HELD": "无此故障", "NOT CHECKED": "未检查",
    "DOES NOT APPLY": "不适用",
    # headings
    "HELD: looked for, and not there (in brackets: the same measurement with the failure put in on purpose)":
        "无此故障：找过，没有（括号内：故意放入这个故障时，同样的测量得到什么）",
    "HELD, with the repairs above: looked for, and not there (in brackets: the same measurement with the failure put "
    "in on purpose)":
        "加上上面的改法之后，无此故障：找过，没有（括号内：故意放入这个故障时，同样的测量得到什么）",
    "In force": "生效的设置", " (given: {})": "（给的是：{}）",
    "Not looked at: {}later steps, another device, launch or data.":
        "没有看：{}更后面的步、别的设备、别的启动方式、别的数据。",
    "--all has the rest: {}": "其余的见 --all：{}", "{} notes": "{} 条注意", "{} cuts": "裁掉 {} 处",
    "what each reward function pays": "每个奖励函数给多少",
    # the settings, and the instruments
    "checkpointing": "检查点", "weights": "权重", "adapters": "适配器", "quantization": "量化", "temperature": "温度",
    "one step": "一步", "reference": "参考模型", "engine": "生成引擎",
    "draws and rows": "采样和数据", "reward table": "奖励表", "step": "一步梯度", "model": "模型",
    "libraries": "库自己的话",
    "found {}": "有 {}", "noted {}": "提示 {}", "held {}": "没有 {}", "not checked {}": "未检查 {}",
    "does not apply {}": "不适用 {}",
    # an edit
    "NOT TRIED {}: {}": "没有试 {}：{}", "healed by this edit": "这个改法治好了", "came": "新出现",
    "shows now, and was not measured before": "现在看到，之前没有测", "stayed": "还在",
    "gone, and not healed: nothing holds it, or something came": "不见了，但不算治好：没有测量证明，或者有新的出现",
    "no failure came or went": "没有变化", "  no figure is another one": "  没有数字变化",
    "  and {} more figures (--json has all)": "  还有 {} 个数字（--json 里有全部）",
    "Cut: {}.": "裁掉的：{}。", "Note: {}.": "注意：{}。", "ERROR {}": "错误：{}",
    "what these releases have in some settings (docs/atlas.md): {}":
        "这些版本在某些设置下有的故障（docs/atlas.md）：{}",
    # of one finding
    "with this repair: {} (tried)": "加上这个改法：{}（试过）", "tried beside it: {}": "另外试过：{}",
    "repair: {}": "改法：{}", "repair (tried): {}": "改法（试过）：{}", "why: {}": "原因：{}",
    "hangs on: {}": "取决于：{}", " of {}": "，共 {}",
    " (healthy: {})": "（正常：{}）",
    "line {}": "第 {} 行", "cell {}, line {}": "单元格 {}，第 {} 行",
    # the last line
    "{}: {}": "{}：{}", "{} named ({})": "确定 {} 个（{}）", "{} suspected ({})": "怀疑 {} 个（{}）",
    "ended early, by the error below": "提前停下了，错误见下", ", {} noted ({})": "，{} 个只作提示（{}）",
    "; the script ended in an error too.": "；脚本还报错停下了。",
    "; what was cut ended the run.": "；运行因裁剪而停下。",
    "could not be judged.": "没法检查。",
    "; the worst: {} ({})": "；最严重的：{}（{}）", "blocks": "训练停下",
    "learns nothing": "什么也学不到", "slows": "变慢",
    "memory": "占内存", "the script": "脚本", "this release": "这个版本", "what was cut": "裁掉的部分",
    "nothing found; {} held in these steps": "没有发现；{} 个在这几步里测量过，没有",
    ", {} not checked ({})": "，{} 个没有检查（{}）",
    ", {} do not apply": "，{} 个不适用", ".": "。", ", ": "，",
    # the table of rewards
    "form": "格式", "completion": "completion（回答）", "right": "对", "wrong": "错", "other": "其他", "none": "无答案",
    "and {} more completions (--json has all)": "还有 {} 个 completion（--json 里有全部）",
    # names and titles that the registry has not
    "missing name": "没有的名字", "wrong argument": "参数不对", "callback": "回调",
    "the cut": "裁剪",
    "An error that what was cut may have made": "可能由裁剪造成的错误",
    "A name that the installed release does not have": "安装的版本里没有的名字",
    "What the trainer is given is not what it takes": "传给 trainer 的东西不是它要的",
    "A callback of the script's that raises, stops the training or undoes it":
        "脚本自己的回调（callback）报错、让训练停下，或者抵消训练",
}  # fmt: skip
LANGUAGES: dict[str, dict[str, str]] = {"en": {}, "zh": _CHINESE}


def speak(language: str) -> Callable[..., str]:
    """Return what says an English text in a language, with values in the places of its `{}`."""
    texts = LANGUAGES[language]

    def say(text: str, *values: object) -> str:
        said = texts.get(text, text)
        return said.format(*values) if values else said

    return say
