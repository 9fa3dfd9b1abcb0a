"""Sentences rewritten by rules: other words of the same meaning, or the opposite. No model and no library does it.

The first is a stand-in for paraphrases that people or models write: words and phrases of a fixed table are replaced,
verbs are contracted and openings moved, but a sentence keeps its order of words otherwise.
"""

from __future__ import annotations

import re

_SAME = """
a number of=several|able to=in a position to|according to=following|actual=real|added=appended|additional=further
allow=permit|allows=permits|allowed=permitted|almost=nearly|alphabetical=alphabetic|already=by now|also=as well
although=even though|always=in every case|any number of=arbitrarily many|appear=show up|appears=shows up
appropriate=suitable|as well as=and also|associated=linked|at least=no fewer than|at most=no more than|attempt=try
attempts=tries|automatically=by itself|available=at hand|basic=fundamental|because=since|before=prior to|begin=start
begins=starts|behaves=acts|between=among|big=large|both=the two|brief=short|build=construct|built=constructed
by default=unless told otherwise|called=invoked|carefully=with care|causes=makes|certain=particular|change=alter
changed=altered|changes=alters|choose=pick|chosen=picked|collection=set|common=usual|complete=full
completely=entirely|consists of=is made up of|contain=hold|contains=holds|containing=holding|convert=turn
converted=turned|correct=right|create=make|created=made|creates=makes|current=present|currently=at present
defined=given|deleted=removed|depending on=according to|describe=explain|described=explained|describes=explains
determine=find out|determined=found out|different=other|directly=straight|discussed=treated|done=carried out
during=in the course of|each=every|easily=without effort|easy=simple|either=one of|empty=blank|end=finish
ends=finishes|ensure=make sure|ensures=makes sure|entire=whole|equal=the same|equivalent=equal|especially=above all
evaluated=worked out|every=each|exactly=precisely|example=instance|except=apart from|executed=run|execution=running
exist=are there|exists=is there|explicitly=expressly|fast=quick|feature=facility|features=facilities|final=last
finally=at last|find=discover|first=initial|following=next|for example=for instance|found=discovered|frequently=often
function=routine|functions=routines|further=more|generally=in general|get=obtain|given=supplied|gives=supplies
handle=deal with|handles=deals with|hence=so|however=but|identical=the very same|if=in case|immediately=at once
implement=realise|implemented=realised|important=essential|in addition=besides|in order to=to|include=comprise
includes=comprises|indicate=show|indicates=shows|instead of=in place of|invalid=wrong|issue=problem|issues=problems
kind=sort|kinds=sorts|large=big|later=afterwards|like=as|located=placed|made=produced|make=produce|many=a lot of
match=fit|matches=fits|may=can|meaning=sense|means=signifies|modified=adapted|modify=adapt|must=has to|necessary=needed
need=require|needs=requires|never=at no time|new=fresh|normally=ordinarily|note that=mind that|number=count
obtain=get|obtained=got|occur=happen|occurs=happens|often=frequently|only=just|optional=not required|original=first
other=further|otherwise=if not|particular=specific|performed=done|performs=does|permitted=allowed|possible=feasible
previous=earlier|prevent=stop|prevents=stops|provide=offer|provided=offered|provides=offers|quickly=fast
raise=throw|raised=thrown|raises=throws|rather than=instead of|receive=get|receives=gets|refer to=point to
refers to=points to|regardless of=no matter|related=connected|remain=stay|remains=stays|remove=delete|removed=deleted
replaced=exchanged|represent=stand for|represents=stands for|require=need|required=needed|requires=needs
result=outcome|results=outcomes|return=give back|returned=given back|returns=gives back|same=identical|see also=compare
select=choose|selected=chosen|several=a number of|should=ought to|similar=alike|simple=plain|simply=just
since=because|single=sole|slow=sluggish|small=little|some=a few|sometimes=at times|special=particular|specified=stated
specifies=states|specify=state|start=begin|starts=begins|stop=halt|subsequent=later|such as=like|supplied=given
support=back|supported=backed|supports=backs|therefore=so|these=the following|though=although|thus=so|together=jointly
treated=regarded|tries=attempts|true=correct|type=kind|types=kinds|typically=as a rule|unchanged=as it was|unless=if not
until=up to when|use=employ|used=employed|useful=helpful|user=person|uses=employs|using=with|usually=mostly
valid=legal|value=content|values=contents|via=through|want=wish|way=manner|when=whenever|whether=if|whole=entire
will=shall|with respect to=regarding|within=inside|without=lacking|wrong=mistaken
""".replace("\n", "|")
SAME = dict(entry.split("=") for entry in _SAME.strip("|").split("|"))

_SHORT = {
    "cannot": "can't", "can not": "can't", "do not": "don't", "does not": "doesn't", "did not": "didn't",
    "is not": "isn't", "are not": "aren't", "was not": "wasn't", "were not": "weren't", "will not": "won't",
    "would not": "wouldn't", "should not": "shouldn't", "has not": "hasn't", "have not": "haven't",
    "it is": "it's", "that is": "that's", "there is": "there's", "they are": "they're",
}  # fmt: skip

_OPPOSITE = """
is not=is|are not=are|cannot=can|does not=does|do not=do|was not=was|will not=will|must not=must|should not=should
is=is not|are=are not|can=cannot|does=does not|do=do not|was=was not|will=will not|must=must not|should=should not
may=may not|always=never|never=always|all=no|none=all|every=no|before=after|after=before|first=last|last=first
more=less|less=more|larger=smaller|smaller=larger|higher=lower|lower=higher|true=false|false=true|with=without
without=with|same=different|different=same|valid=invalid|invalid=valid|allowed=forbidden|at least=at most
at most=at least|left=right|right=left|open=closed|closed=open|optional=required|required=optional|empty=full
one=nine|two=eight|three=seven|four=six|five=four|ten=twelve
""".replace("\n", "|")
OPPOSITE = dict(entry.split("=") for entry in _OPPOSITE.strip("|").split("|"))


def _matcher(table: dict[str, str]) -> re.Pattern[str]:
    longest_first = sorted(table, key=lambda each: (-len(each), each))
    return re.compile(r"\b(" + "|".join(map(re.escape, longest_first)) + r")\b", re.IGNORECASE)


_SAME_AT, _SHORT_AT, _OPPOSITE_AT = _matcher(SAME), _matcher(_SHORT), _matcher(OPPOSITE)
_OPENING = re.compile(r"^(If|When|In|For|By|With|As|Since|Because|After|Before) ([^,]{8,60}), ([^,]{12,})\.$")
_NUMBER = re.compile(r"\d+")


def paraphrased(sentence: str) -> str:
    """The same in other words, as far as the table goes."""
    opening = _OPENING.match(sentence)
    if opening is not None:
        word, clause, rest = opening.groups()
        sentence = f"{rest[0].upper()}{rest[1:]}, {word.lower()} {clause}."
    return _replaced(_SHORT_AT, _SHORT, _replaced(_SAME_AT, SAME, sentence))


def contradicted(sentence: str) -> str:
    """The opposite, in nearly the same words: the first two that have one are turned round, all numbers changed."""
    turned = _replaced(_OPPOSITE_AT, OPPOSITE, sentence, count=2)
    return _NUMBER.sub(lambda match: str(int(match[0]) * 3 + 7)[-max(1, len(match[0])) :], turned)


def _replaced(at: re.Pattern[str], table: dict[str, str], text: str, count: int = 0) -> str:
    def other(match: re.Match[str]) -> str:
        found = table[match[0].lower()]
        return found[0].upper() + found[1:] if match[0][0].isupper() else found

    return at.sub(other, text, count=count)
