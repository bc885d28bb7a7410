"""A schema as a Python function: `python examples/promptcache/travel.py` prints it, and a prompt of it."""

from kvstore.promptcache import prompt_function


@prompt_function(lengths={"dish": 12})
def meals(p, dish="anything"):
    p.text(f"I eat {dish}. ")


@prompt_function(name="journey-py", lengths={"days": 12})
def journey(p, days, place="lisbon", with_children=False):
    p.system("You plan journeys, day by day.")
    with p.user():
        p.text(f"I have {days}. ")
        if with_children:
            p.text("Two children of six come along. ")
        match place:
            case "lisbon":
                p.text("Lisbon: seven hills, yellow trams, and the river. ")
            case "kyoto":
                p.text("Kyoto: temples, gardens, and the shops of Nishiki market. ")
        meals(p, dish="no meat")
    p.ask("What do I do first?")


if __name__ == "__main__":
    print(journey.pml)
    print(journey.prompt("four days", place="kyoto", with_children=True))
