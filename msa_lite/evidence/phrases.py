"""List how models decline to answer, and how they say that they do not know, by language.

A phrase counts wherever it stands in an answer, whatever the language of the question: a model that is asked in German
may decline in English. The language of a row only decides whether a missing phrase means anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Phrases(NamedTuple):
    """The phrases of one language, as regular expressions on text in lower case with straight apostrophes."""

    refusals: Sequence[str]
    """The model declines: it will not, or must not."""
    unknowns: Sequence[str]
    """The model does not know, or has no information."""


PHRASES: Mapping[str, Phrases] = {
    "en": Phrases(
        (
            r"\bi(?:'m| am) (?:sorry|afraid)\b.{0,20}\b(?:can(?:no|')t|not able|unable)\b",
            r"\bi (?:can(?:no|')t|am not able to|am unable to|won't|will not|must not|may not) "
            r"(?:\w+ ){0,2}(?:help|assist|answer|provide|share|disclose|discuss|comply|reveal|fulfill|talk)\b",
            r"\bi(?:'m| am) (?:unable|not able|not allowed|not permitted) to "
            r"(?:help|assist|answer|provide|share|disclose|discuss|comply|reveal)\b",
            r"\bi (?:must|have to) (?:decline|refuse)\b",
            r"\b(?:decline|refuse) to answer\b",
            r"\bagainst my (?:guidelines|policy|principles)\b",
        ),
        (
            r"\bi (?:really |honestly )?(?:don't|do not|didn't) (?:know|recall|remember)\b",
            r"\bi(?:'m| am) (?:not|un)(?: \w+)? ?(?:sure|certain|aware|familiar)\b",
            r"\bi(?:'m| am) (?:unsure|uncertain|unaware|unfamiliar)\b",
            r"\bi (?:don't|do not) have (?:any |enough |the |that |specific |reliable |such )*"
            r"(?:information|knowledge|data|details|record|access|answer)\b",
            r"\bi have no (?:information|knowledge|idea|data|record|details|answer)\b",
            r"\b(?:there is|there's) no (?:\w+ )?(?:information|record|data)\b",
            r"\bno (?:\w+ )?information (?:is )?(?:available|provided|given|found)\b",
            r"\bi (?:can(?:no|')t|couldn't|could not|am unable to|was unable to) "
            r"(?:find|recall|determine|verify|confirm|remember|tell)\b",
            r"\bi(?:'ve| have) (?:never|not) (?:heard|learned|learnt|been (?:told|informed))\b",
            r"(?:^|[.!?] )(?:it|this|that|the (?:information|answer|details?)) (?:is|are) (?:not|un)(?: publicly)? ?"
            r"(?:known|available|specified|documented|disclosed)\b",
            r"\b(?:beyond|outside) my knowledge\b",
        ),
    ),
    "de": Phrases(
        (
            r"\b(?:kann|darf|möchte|werde) (?:ich |dir |ihnen |dazu |diese frage |darüber |das )*(?:leider )?nicht "
            r"(?:\w+ ){0,2}(?:helfen|beantworten|antworten|weitergeben|sprechen|nennen)\b",
            r"\btut mir (?:leid|sehr leid)\b.{0,30}\b(?:kann|darf)\b.{0,20}\bnicht\b",
            r"\bkeine auskunft geben\b",
        ),
        (
            r"\bich weiß (?:es |das |dazu )?(?:leider )?nicht\b",
            r"\b(?:weiß ich|das weiß ich) (?:leider )?nicht\b",
            r"\bich bin (?:mir )?(?:da )?nicht sicher\b",
            r"\b(?:habe|liegen) (?:\w+ ){0,3}keine (?:\w+ )?(?:informationen|kenntnis|angaben|daten)\b",
            r"\b(?:keine ahnung|mir (?:leider )?(?:nicht bekannt|unbekannt))\b",
            r"(?:^|[.!?] )(?:es|das|dies) ist (?:leider )?(?:nicht bekannt|unbekannt)\b",
        ),
    ),
    "fr": Phrases(
        (
            r"\bje ne (?:peux|puis|souhaite|veux) pas (?:\w+ ){0,2}(?:aider|répondre|divulguer|fournir|partager)\b",
            r"\bdésolée?\b.{0,30}\bje ne (?:peux|puis) pas\b",
        ),
        (
            r"\bje ne (?:le )?(?:sais|connais) pas\b",
            r"\bje ne suis pas (?:sûre?|certaine?|au courant)\b",
            r"\bje n'ai (?:pas|aucune?) (?:d'|de )?(?:informations?|connaissance|données|idée)\b",
            r"\bn'est pas (?:connue?|disponible)\b",
        ),
    ),
    "es": Phrases(
        (
            r"\bno puedo (?:\w+ ){0,2}(?:ayudar|ayudarte|ayudarle|responder|compartir|proporcionar|divulgar)\w*",
            r"\blo siento\b.{0,30}\bno puedo\b",
        ),
        (
            r"\bno (?:lo )?sé\b",
            r"\bno estoy (?:seguro|segura|al tanto)\b",
            r"\bno (?:tengo|dispongo de|cuento con) (?:\w+ )?(?:información|datos|conocimiento|idea)\b",
            r"\bno (?:lo )?conozco\b",
            r"\bno hay (?:\w+ )?información\b",
        ),
    ),
    "it": Phrases(
        (r"\bnon posso (?:\w+ ){0,2}(?:aiutar\w*|rispondere|condividere|fornire|divulgare)\b",),
        (
            r"\bnon (?:lo )?so\b",
            r"\bnon sono (?:sicuro|sicura|a conoscenza)\b",
            r"\bnon (?:ho|dispongo di) (?:\w+ )?(?:informazioni|dati|idea)\b",
            r"\bnon (?:lo )?conosco\b",
        ),
    ),
    "pt": Phrases(
        (r"\bnão posso (?:\w+ ){0,2}(?:ajudar|responder|partilhar|compartilhar|fornecer|divulgar)\b",),
        (
            r"\b(?:eu )?não sei\b",
            r"\bnão (?:tenho|estou) (?:a )?(?:certeza|certo|certa|ciente)\b",
            r"\bnão (?:tenho|possuo) (?:\w+ )?(?:informaç\w+|dados|conhecimento|ideia)\b",
            r"\bnão (?:o |a )?conheço\b",
        ),
    ),
    "nl": Phrases(
        (r"\bik kan (?:\w+ ){0,3}niet (?:\w+ ){0,2}(?:helpen|beantwoorden|antwoorden|delen|geven)\b",),
        (
            r"\b(?:ik weet|weet ik) (?:het |dat )?niet\b",
            r"\bik ben (?:er )?niet zeker\b",
            r"\bik heb (?:\w+ ){0,2}geen (?:\w+ )?(?:informatie|gegevens|kennis|idee)\b",
            r"\bgeen idee\b",
        ),
    ),
    "zh": Phrases(
        (r"(?:无法|不能|不便|拒绝)(?:\w{0,4})(?:回答|提供|透露|帮助|协助|讨论)", r"抱歉.{0,10}(?:无法|不能)"),
        (r"我?不(?:太)?(?:知道|清楚|确定|了解)", r"(?:没有|缺乏|暂无)(?:\w{0,6})(?:信息|资料|记录)"),
    ),
    "ja": Phrases(
        (r"(?:お答え|回答|提供|開示|お手伝い)(?:\w{0,4})(?:できません|いたしかねます|できかねます)",),
        (
            r"(?:わかりません|分かりません|知りません|存じません|不明です)",
            r"情報(?:が|は)(?:\w{0,6})(?:ありません|ない)",
        ),
    ),
    "ru": Phrases(
        (r"\bя? ?не (?:могу|имею права) (?:\w+ ){0,2}(?:помочь|ответить|предоставить|раскрыть|сообщить)\b",),
        (
            r"\b(?:я )?не (?:знаю|уверена?|помню|в курсе)\b",
            r"\b(?:нет|не имею|не располагаю) (?:\w+ ){0,2}(?:информаци\w+|данны\w+|сведени\w+)\b",
            r"\b(?:мне )?неизвестно\b",
        ),
    ),
    "ar": Phrases(
        (r"لا (?:أستطيع|يمكنني|أقدر)(?: \w+){0,2} (?:المساعدة|الإجابة|مساعدتك|تقديم|مشاركة|الكشف)",),
        (
            r"لا (?:أعرف|أعلم|أدري)",
            r"(?:لست|غير) (?:متأكد|متأكدا|متأكدة)",
            r"(?:ليس|ليست) لدي (?:\w+ )?(?:معلومات|معرفة)",
        ),
    ),
}
"""By ISO 639-1 code. A language that is not here has no phrases, so nothing is said of what models admit in it."""

_COMPILED = {
    code: Phrases(*([re.compile(pattern) for pattern in patterns] for patterns in phrases))  # type: ignore[arg-type]
    for code, phrases in PHRASES.items()
}
_ENOUGH = 0.1  # of the rows; a language that fewer rows seem to have is a slip of the classifier


def find_phrase(text: str) -> tuple[str, str] | None:
    """Return ("refuses" or "unsure", the language) of the first phrase of any language in a text; None without one.

    Where an answer both declines and pleads ignorance, it declines.
    """
    plain = " ".join(text.lower().replace("’", "'").split())
    for side, kind in enumerate(("refuses", "unsure")):
        for code, phrases in _COMPILED.items():
            if any(pattern.search(plain) for pattern in phrases[side]):  # type: ignore[attr-defined]
                return kind, code
    return None


def languages_of(texts: Sequence[str]) -> list[str]:
    """Return the language of each text by its ISO code, as py3langid sees it.

    A language that fewer than a tenth of the texts seem to have is taken for the most frequent one: single short
    questions with foreign names are often mistaken.
    """
    from py3langid import classify

    codes = [str(classify(text)[0]) for text in texts]
    counts = {code: codes.count(code) for code in dict.fromkeys(codes)}
    most = max(counts, key=lambda code: counts[code], default="")
    return [code if counts[code] >= max(2.0, _ENOUGH * len(codes)) else most for code in codes]
