"""Text for the demo tokenizer, generated from word lists and a seed: no downloaded data, same text every time."""

import random
from collections.abc import Iterator
from itertools import product
from typing import Final


def _words(text: str) -> list[str]:
    return text.split()


# Common words by the place they take in a sentence.
NOUNS: Final = _words("""
answer apple area army article author bag ball bank base battle bed bird board boat body book bottle box boy bread
bridge brother building bus business cable cake camera car card case cat cell chair chance change chapter chart
child church circle city class client cloud coat code coffee color column company computer copper corner country
course cup customer data date daughter day deal desk detail device dinner doctor dog door dream dress driver earth
east edge effect effort egg engine error evening event example eye face fact family farm father field file fire
fish floor flower food forest form friend fruit function future game garden gate girl glass goal gold grass group
guide hair hall hand harbor head heart height hill history hole home horse hospital hour house idea image index
island item job journey key king kitchen lake lamp land language law layer leader leaf letter level library light
line list lock machine mail man map market matter meal meaning measure meeting memory message metal method middle
milk minute mirror model moment money month moon morning mother mountain mouth music name nation network night
north nose note number object ocean office oil order page paint paper parent park part path pattern pencil people
person phone picture piece place plan plant plate point police pool port price prize problem process product
program project question queue radio rain reason record region request result rice river road rock roof room root
rope row rule sail salt sample school science score screen sea season second secret seed sentence server shape
sheet ship shoe shop side sign silver sister size skin sky snow song sound source south space speed spring square
stage star state station step stone store storm story street string student study subject sugar summer sun surface
system table task teacher team test text thing thought ticket time token tool town train tree trip truck truth turn
type uncle unit user valley value view village visit voice wall water wave way weather week weight west wheel wind
window winter wire woman wood word work worker world year yard
""")
VERBS: Final = _words("""
accept add allow answer appear arrive ask begin believe bring build buy call carry catch change choose close come
compare continue copy count create cross cut decide deliver describe draw drive drop eat enter explain fall feel
fetch fill find finish follow forget get give go grow hear help hold hope join jump keep know learn leave lend let
like listen live look lose love make mean measure meet mention move need notice offer open pass pay pick plan play
point pull push put reach read receive remember repeat reply return rise run save say search see seem sell send set
share show sing sit sleep sort speak spend stand start stay stop store take talk teach tell think touch travel try
turn understand use visit wait walk want warm wash watch wear win wish wonder write
""")
ADJECTIVES: Final = _words("""
able bad big black blue brave bright broad brown calm careful cheap clean clear clever cold common cool dark deep
dry early easy empty equal exact fair famous fast final fine fresh full gentle glad good gray great green happy
hard heavy high hot huge kind large last late light little long loud low narrow near new nice old open orange pink
plain poor quick quiet rare ready real red rich right round safe sharp short simple slow small smart smooth soft
strange strong sweet tall thick thin tiny true warm weak wet white whole wide wild wise wrong yellow young
""")
LINKS: Final = _words("""
about above after again against all along also always and another any around as at away back because before behind
below between both but by down during each enough even ever every few first for from here how if in inside into it
its just less many maybe more most much must near never next no not now of off often on once one only or other our
out outside over perhaps rather she he they we you i same since so some soon still such than that the their them
then there these this those though through to together too toward two under until up upon very what when where
which while who why will with within without would yes yet your is are was were be been has have had do does did
can could should may might a an my his her me him us
""")

_NAME_STARTS: Final = _words("ba be da do fa fe ga jo ka ke la lo ma mi na no pa ra re sa se ta te va vi za")
_NAME_ENDS: Final = _words("bel den dor fin gan kin lan lis mar nor pan rin san tal ton vek")

PLACES: Final = _words("""
London Paris Rome Oslo Berlin Madrid Tokyo Cairo Lima Delhi Boston Dublin Vienna Prague Athens Lisbon Seoul Havana
Geneva Milan Quito Tunis Zurich Munich Sydney
""")
PEOPLE: Final = _words("""
Alice Bob Carol Dave Emma Frank Grace Henry Iris Jack Kate Liam Mia Noah Olivia Paul Quinn Rosa Sam Tina Anna Ben
Clara David Eva Hugo Ivan Julia Karl Laura Max Nina Oscar Peter Ruth Simon Tom Vera Walter
""")

# Words of the chat format and of what people say to an assistant, so that they cost one token each.
CHAT: Final = _words("""
access arrays assistant available before booleans calls can cannot capital city complete count day days defined
demo direct directly effort enabled everything following format forecast goodbye hello help higher hi how i input
instructions integer inside invoke invokes items json language length like lower lowercase max maybe message model
must nothing numbers objects offers other otherwise output owner parameter parameters passage pass password people
please prefix properties questions reasoning reasonable repeat required response result reverse schema schemas
search should specified speak string strictly strings sunny rainy cloudy windy snowy foggy temperature thank thanks
thinking thorough today tool tools triggered types uppercase used user users value values weather welcome what's
word words yes you
apples oranges euros dollars degrees first second third last
""")


def names() -> list[str]:
    """Invented names, two syllables each: something to ask about that no text has told before."""
    return [(start + end).capitalize() for start, end in product(_NAME_STARTS, _NAME_ENDS)]


def lines(seed: int, count: int) -> Iterator[str]:
    """``count`` lines of English-looking prose, dialogue, lists, code, JSON and chat furniture."""
    draw = random.Random(seed)
    kinds = (_prose, _prose, _dialogue, _listing, _code, _document, _fact, _request, _calls, _chat)
    for number in range(count):
        yield kinds[number % len(kinds)](draw)


def _sentence(draw: random.Random) -> str:
    words = [draw.choice(LINKS), draw.choice(ADJECTIVES), draw.choice(NOUNS), draw.choice(VERBS)]
    words += [draw.choice(draw.choice((LINKS, NOUNS, VERBS, ADJECTIVES))) for _ in range(draw.randint(2, 9))]
    if draw.random() < 0.2:
        words.insert(draw.randrange(1, len(words)), str(draw.randrange(100)))
    text = " ".join(words)
    return text.capitalize() if draw.random() < 0.8 else text


def _prose(draw: random.Random) -> str:
    return " ".join(_sentence(draw) + draw.choice(".....,;!?") for _ in range(draw.randint(1, 4))) + "\n"


def _dialogue(draw: random.Random) -> str:
    speaker, other = draw.sample(names(), 2)
    return f'{speaker}: "{_sentence(draw)}?"\n{other}: "{_sentence(draw)}."\n\n'


def _listing(draw: random.Random) -> str:
    bullet = draw.choice(("- ", "* ", "1. ", "  - "))
    return "".join(
        f"{bullet}{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)}\n" for _ in range(draw.randint(2, 6))
    )


def _code(draw: random.Random) -> str:
    function, value = f"{draw.choice(VERBS)}_{draw.choice(NOUNS)}", draw.choice(NOUNS)
    return (
        f"def {function}({value}: int) -> str:\n    if {value} == {draw.randrange(100)}:\n"
        f'        return "{draw.choice(ADJECTIVES)}"\n    return str({value} + {draw.randrange(10)})\n\n'
    )


def _document(draw: random.Random) -> str:
    return (
        f'{{"name": "get_{draw.choice(NOUNS)}", "description": "{_sentence(draw)}", "parameters": '
        f'{{"type": "object", "properties": {{"{draw.choice(NOUNS)}": {{"type": "string"}}}}, '
        f'"required": ["{draw.choice(NOUNS)}"]}}}}\n'
    )


def _fact(draw: random.Random) -> str:
    name, code = draw.choice(names()), f"{draw.randrange(100):02d} {draw.randrange(100):02d}"
    return f"The code of {name} is {code}. What is the code of {name}? {name} {code}\n"


def _calls(draw: random.Random) -> str:
    name, field = f"get_{draw.choice(NOUNS)}", draw.choice((*NOUNS, *CHAT))
    value = draw.choice((*CHAT, *NOUNS, *ADJECTIVES, *PLACES, *PLACES, *PEOPLE))
    return (
        f'< calls>\n< invoke name="{name}">\n< parameter name="{field}" string="true">{value}'
        f"</ parameter>\n</ invoke>\n</ calls>\n\n### Available Tool Schemas\n\n$TOOL_NAME $PARAMETER_NAME "
        f'"TRUE|FALSE" `string="false"`. $PARAMETER_VALUE You MUST BEFORE JSON Response Format String\n'
        f'{{"{draw.choice((*NOUNS, *CHAT))}": "{value}"}} writing a block thinking_mode\nOtherwise\n'
    )


def _chat(draw: random.Random) -> str:
    words = " ".join(draw.choice(CHAT) for _ in range(16))
    heads = " ".join(draw.choice((*CHAT, *VERBS)).capitalize() for _ in range(4))
    bare = "\n".join(draw.choice((*CHAT, *NOUNS, *ADJECTIVES)) for _ in range(6))
    who = draw.sample(names(), 8) + draw.sample(PLACES, 2) + draw.sample(PEOPLE, 2)
    lone = "\n".join(draw.sample(names(), 8) + draw.sample(PLACES, 2) + draw.sample(PEOPLE, 2))
    return f"{words} {heads} {' '.join(who)}.\n{bare}\n{lone}\n"


def _request(draw: random.Random) -> str:
    return (
        f"Reasoning Effort: {draw.randint(1, 100)} (range 1-100, the higher the value, the more thorough the "
        f"reasoning)\n\nYou are a helpful assistant. Hello, {draw.choice(names())}! Please {draw.choice(VERBS)} "
        f"the {draw.choice(NOUNS)}.\n\n## Tools\n\n<tool_result>{_sentence(draw)}</tool_result>\n"
    )
