"""Documents, questions and answers that `kvctl promptcache verify` measures with when nobody names others. About things
that no model knows, so that the answers can only come from the documents."""

from __future__ import annotations

from typing import Any

_PORT = (
    "The harbour of Velmora has four quays. The north quay takes timber ships, the south quay takes grain, and the two"
    " quays in the middle belong to the ferries. A ferry to Ostby leaves every forty minutes from six in the morning"
    " until ten at night. The harbour master is Ingrid Solheim, who took the office over from her uncle in 2011."
)
_LIBRARY = (
    "The town library of Velmora lends books for twenty-eight days. Films may be kept for seven days, and board games"
    " for fourteen. Whoever returns a book late pays twenty cents a day, but never more than five euros for one book."
    " The reading room on the second floor is open on Sundays from noon to six."
)
_MILL = (
    "The old paper mill stands where the river Tarn leaves the lake. It was built in 1764 by the brothers Aksel and"
    " Jens Brandt, burned down twice, and made paper for banknotes until 1952. Today it is a museum. In the cellar"
    " visitors may make a sheet of paper of their own out of linen rags."
)
_TRAM = (
    "Line 3 of the tram goes from the central station through the garden suburb to the university hospital. The ride"
    " takes nineteen minutes. Bicycles may be taken along before seven in the morning and after seven in the evening;"
    " dogs travel free of charge, but need a lead. The line was closed for eleven months when the bridge was repaired."
)
_CHEESE = (
    "Solberg is a hard cheese made from the milk of sheep that graze on the salt meadows. The wheels are turned every"
    " third day and rubbed with brine in which juniper berries have been boiled. After nine months they are ready; a"
    " wheel then weighs six kilograms. Only four farms make it, and none of them sends it abroad."
)
_LIGHT = (
    "The lighthouse on Skarv island was lit for the first time on the second of October 1889. Its lamp burned rapeseed"
    " oil, later petroleum, and since 1963 it has been electric. The light shows two flashes every fifteen seconds and"
    " is seen from nineteen sea miles away. The last keeper, Magnus Dahl, left the island in 1987 with his goat."
)

SAMPLES: tuple[dict[str, Any], ...] = (
    {
        "documents": [_PORT, _LIBRARY, _MILL],
        "question": "For how many days may films be kept, and what does a late book cost a day?",
        "answer": "Films may be kept for seven days, and a late book costs twenty cents a day.",
    },
    {
        "documents": [_TRAM, _PORT, _CHEESE],
        "question": "How often does a ferry to Ostby leave, and who is the harbour master?",
        "answer": "A ferry to Ostby leaves every forty minutes. The harbour master is Ingrid Solheim.",
    },
    {
        "documents": [_LIGHT, _MILL, _TRAM],
        "question": "Who built the paper mill, and when?",
        "answer": "The paper mill was built in 1764 by the brothers Aksel and Jens Brandt.",
    },
    {
        "documents": [_CHEESE, _LIGHT, _LIBRARY],
        "question": "How does one tell the light of Skarv island, and who was its last keeper?",
        "answer": "It shows two flashes every fifteen seconds. The last keeper was Magnus Dahl.",
    },
    {
        "documents": [_MILL, _CHEESE, _TRAM],
        "question": "How long does Solberg ripen, and how much does a wheel weigh?",
        "answer": "Solberg is ready after nine months, and a wheel then weighs six kilograms.",
    },
    {
        "documents": [_LIBRARY, _TRAM, _LIGHT],
        "question": "When may bicycles be taken along on line 3?",
        "answer": "Bicycles may be taken along before seven in the morning and after seven in the evening.",
    },
)
