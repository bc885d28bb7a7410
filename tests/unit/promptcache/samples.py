"""Prompt functions that tests read and run: they need a source file."""

from textwrap import dedent

from kvstore.promptcache import prompt_function

RULES = dedent("""
    Be brief.
      Be kind.
""")


@prompt_function(lengths={"taste": 4})
def food(p, taste="mild", sweet=False):
    p.text(f"I like {taste} food. ")
    if sweet:
        p.text("And cake. ")


@prompt_function(name="travel", lengths={"days": 5})
def trip(p, days, place="rome", hotel=False, sweet=False, question="Plan it."):
    """A trip."""
    p.system("You plan <trips> & more.")
    with p.user():
        p.text(RULES)
        p.text(f"I travel for {days}." + " Yes.")
        if hotel:
            p.text("I need a hotel.")
        match place:
            case "rome":
                p.text("Rome.")
            case "tokyo":
                p.text("Tokyo.")
                if hotel and days:
                    p.text("A capsule hotel.")
            case _:
                p.text("Anywhere.")
        if days == "a day":
            p.text("A day for ")
            p.text(days)
        elif hotel:
            p.text("Long with hotel.")
        else:
            p.text("Long.")
        spicy = "spicy"
        food(p, taste=spicy, sweet=sweet)
        food(p)
    p.ask(f"{question} For {days}!")
    return None
