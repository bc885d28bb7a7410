"""Conversations for the demo, written for this project: each is about a text that its first message brings \
along.

`SYSTEM` begins all of them. A conversation is a list of what the user says; the model's answers come in between.
"""

SYSTEM = """\
You are the reading assistant of a small public library. Visitors bring you a text and then ask about it, one \
question after another. Answer from the text alone. Keep every answer to one or two short sentences, name \
numbers, places and people exactly as the text does, and say so plainly when the text does not tell. Do not \
repeat the question, do not add advice that nobody asked for, and never invent a detail to make an answer \
sound complete. If two parts of the text seem to disagree, mention both. Visitors may come back days later and \
go on where they stopped, so treat the whole conversation as one."""

FERRY = """\
Please read this notice first. I will have a few questions about it.

Notice to passengers of the Skerry Line, winter season

From the first Monday of November until the last Friday of March the ferry Brenna sails in place of the larger \
Hallvard, which goes to the yard at Oskarsund for her five-yearly survey. Brenna carries eighty passengers and \
nine cars. Because she has no bow door, cars drive on backwards at Tallnes and forwards at Mewstone; the deck \
crew will direct every driver, and those who are not sure of themselves may hand over the keys and have the \
mate park for them.

Departures from Tallnes are at 06:40, 10:15, 14:30 and 18:05 on working days. On Saturdays the first sailing \
is left out, and on Sundays only the 10:15 and the 18:05 run. The crossing to Mewstone takes fifty minutes in \
calm weather. From Mewstone the ship returns twenty minutes after she has arrived. The call at Little Holm, \
which takes a quarter of an hour more, is made on request: ring the harbour office before nine in the evening \
of the day before, or hoist the yellow board on the pier of Little Holm at least one hour before the ship is \
due. In fog the board cannot be seen, and then only calls that were asked for by telephone are made.

Fares have not changed since last winter. A single crossing is 38 crowns for adults and 19 for children under \
fourteen; children under four travel free. A car with its driver is 145 crowns. Islanders with a blue card pay \
half of every fare, and pay nothing for bicycles, prams and up to two crates of shopping. Fish boxes are \
charged at 6 crowns each and must stand on the after deck, on the starboard side, where the drain is. Dogs \
travel free but not in the saloon. Tickets are sold on board only; the machine on the quay at Tallnes is out \
of order and will not be mended before spring.

When the wind is stronger than eighteen metres a second from any direction between south-west and north-west, \
the swell across the bar at Mewstone makes the berth unsafe. The skipper, Ingrid Dahle, decides two hours \
before each sailing and has the decision written on the slate outside the harbour office, read on the local \
radio at the full hour, and sent to everyone who has left a number. A cancelled morning sailing is not made up \
for later in the day. When two sailings in a row are cancelled, the pilot boat takes the doctor, the post and \
up to four passengers with urgent business; who they are is decided by the district nurse, Mr Aune, and not by \
the crew.

Last winter eleven sailings out of five hundred and two were cancelled because of weather, and three because \
of a cracked fuel pipe. The pipe has been replaced, and a spare one is now kept on board. We also kept a \
bucket of sand, and a good deal of patience, for the icy ramp at Little Holm: please wear shoes that you can \
walk in.

Lost property is kept for six weeks in the green cupboard behind the ticket desk of the harbour office. At the \
time of writing it holds nine gloves, a tuba mouthpiece, and a child's drawing of the Hallvard that we would \
rather like to keep. Questions are answered by the harbour office between eight and four, or by anyone of the \
crew who is not at that moment holding a rope."""

ALLOTMENT = """\
Here are the minutes of our allotment society. Read them, please; I missed the meeting.

Minutes of the autumn meeting, Canal Lane Allotments, held in the potting shed on 14 October

Present: Mrs Okafor in the chair, Mr Lindqvist for the accounts, Ms Barros as secretary, and twenty-three plot \
holders. Apologies came from the Petrov family, whose youngest had a temperature, and from Mr Adeyemi, who was \
at sea.

1. Water. The new tank behind plot 12 holds four thousand litres and was full by the end of September, thanks \
to the gutter that Mr Singh put along the roof of the tool house. The old tank leaks at the seam and will be \
used for leaf mould. It was agreed that hoses may be used only before eight in the morning and after seven in \
the evening, and that watering cans are welcome at any time. A proposal to meter each plot was put to the vote \
and lost, nine to fourteen. The pump will be taken in for the winter on 3 November; whoever wants water after \
that must carry it from the canal, by the steps and not by the bank.

2. Badgers. Between June and August they ate most of the sweetcorn on plots 3 to 9. Ms Barros reported that a \
low electric wire had been tried on plot 7 and had worked, and that the two plots with prickly hedges lost \
nothing. The society will buy one battery and two hundred metres of wire, to be shared by the plots along the \
railway. Nobody is to put out poison or block a sett: it is against the law, and Mrs Okafor likes the badgers.

3. Accounts. Mr Lindqvist showed an income of 2,310 pounds, of which 1,760 came from rents and 550 from the \
plant sale in May. Expenses were 1,895 pounds. The largest were the tank at 820 and insurance at 415. The \
balance stands at 3,040 pounds. Rents stay at 44 pounds for a full plot and 24 for half a plot. The auditor, \
Miss Chen, found one receipt for biscuits that nobody could explain, and passed the accounts.

4. Empty plots. Numbers 15 and 31 are free. There are nineteen names on the waiting list, the oldest from \
three years ago. Number 31 is under two metres of bramble; it was agreed to offer it for half the rent in the \
first year, and to lend whoever takes it the society's scythe and Mr Singh, who knows how to use it. Number 15 \
goes to the first name on the list.

5. The hedge along Canal Lane. The council wrote that it narrows the path. It will be cut to one metre and a \
half on the last Saturday of November, after the berries and before the frost, by as many as can come, with \
soup afterwards. Mrs Petrov will be asked about the soup. Hawthorn cuttings are wanted by the school for its \
own fence.

6. Competitions. The cup for the heaviest pumpkin went to plot 22 with 61 kilograms; the twins who grew it \
asked that it be recorded that they sang to it. The longest parsnip broke when it was pulled and could not be \
placed. Next year there will be a prize for the ugliest vegetable, which the children will judge.

7. Any other business. Someone has been leaving bags of good compost at the gates of plots whose holders are \
ill. The meeting thanked whoever it is, and decided not to find out. The next meeting is on 9 March at ten, in \
the potting shed if the roof has been mended by then, otherwise in the chapel hall. The meeting closed at noon \
with cake."""

ESPRESSO = """\
This is the handover sheet for the coffee machine in our community cafe. I start on Thursday; please read it.

Looking after Gloria

Gloria is a two-group lever machine from 1987. She weighs seventy-one kilograms, she is older than most of the \
people who work with her, and she is not difficult as long as you do things in order.

Morning. Switch on at the wall, then turn the knob to 1 and wait until the needle of the left gauge moves; \
this takes six minutes. Only then turn the knob to 2, which starts the heating. If you go to 2 at once the \
element runs dry, and a new element costs 260 euros and three weeks of waiting for a man called Ettore. After \
twenty-five minutes the right gauge should stand between 0.9 and 1.1 bar. Open each steam tap for five seconds \
to let the false pressure out, and look at the gauge again: if it has dropped below 0.8, wait ten minutes \
more.

Grinding. The grinder is set with the brass collar; one notch is about two seconds of flow. Use eighteen grams \
for a double. A good shot runs for twenty-eight to thirty-two seconds and gives thirty-six grams in the cup. \
On damp days it runs slower: go one notch coarser, never press less. Beans come from Falk & Daughter on \
Tuesdays, in five-kilogram tins, and want to rest until Friday. We use about fourteen kilograms a week, \
nineteen when there is a market.

Levers. Pull the lever down all the way and hold it for four seconds, so that the water reaches the coffee. \
Then let it rise by itself; keep a hand near it, but do not guide it. Never let go of a lever when there is no \
coffee in the basket: with nothing to push against, the spring throws it up with enough force to break a jaw. \
That is not a way of speaking. It happened in 1994, and the tooth is in the drawer with the spare gaskets.

Milk. Cold milk up to the lower edge of the spout, steam wand just under the surface until the jug feels warm, \
then deeper until you can barely keep your hand on it. Wipe the wand at once and open the tap for one second, \
every time. Oat milk is in the left fridge and foams better when it is very cold. Mrs Haile wants hers at \
fifty degrees, measured, with the thermometer that hangs under the shelf.

Cleaning. After closing, put the blind basket into each group and work the lever five times with half a spoon \
of the white powder, then five times without. Brush the shower screens. On Sundays take the screens off and \
boil them. The gaskets are changed every four months; the next time is the second week of February. Drain the \
boiler on the first of each month. The water filter lasts for nine thousand litres, and the counter beside the \
sink tells how many are left.

When something is wrong. Steam from under the left panel means that the safety valve has opened: switch off at \
the wall, leave the room for a quarter of an hour, and do not touch the knob. A lever that rises too fast \
means a grind too coarse or a basket not filled. A machine that hums without heating has a tripped thermostat; \
the reset button is a red pin behind the drip tray, and it may be pressed once. If it trips again, ring Noor \
on the number inside the cupboard door, or make tea, of which we also sell a great deal."""

GLACIER = """\
I am reading the log of a measuring station with my class. Here is the part we have; questions follow.

From the log of the station at Kvasshorn glacier, second summer

4 June. Arrived with two sledges after nine hours from the hut. The door was under a metre and a half of snow \
and the stove pipe was bent, but nothing inside was wet. Halima mended the pipe with a tin of peaches, once we \
had eaten the peaches. The thermometer on the mast has run through the winter; the lowest it saw was minus \
38.4, on 11 February.

7 June. Drilled the first three stakes. The drill is the hot-water kind: it melts its way down at about a \
metre in two minutes. Stake A stands at 1,420 metres above the sea, B at 1,560 and C at 1,690. Each is eight \
metres long and six of them are in the ice. As the surface melts more of the stake comes out, and that is what \
we measure.

15 June. Rain for two days. The stream by the hut rose so high that it took the plank bridge, which we found \
again four hundred metres further down, on a sandbank, without a scratch. Joren has put it back and tied it to \
a boulder.

28 June. First readings. Ice has gone at A by 94 centimetres, at B by 51, at C by 12. At C there was still \
snow on the fifteenth, so that its ice has only begun to melt. The dust on the lower part is darker than last \
year: after the wind from the south on the twentieth you could write your name in it. Dark ice melts faster, \
and Halima thinks that half of what we see at A is the dust. She has laid out two squares of one metre each, \
one swept clean every day and one not, to find out.

9 July. The clean square stands eleven centimetres higher than the dirty one. It looks like a small stage. A \
wheatear has begun to use it as one.

19 July. The lake at the side of the tongue is full and blue. It has filled each July and emptied, through the \
ice, on one night in August: last year on the twelfth. We have put a pressure gauge on its floor, at a depth \
of 17 metres, and moved the tents away from the stream, up to the old moraine.

2 August. Readings: A 231 centimetres in all, B 160, C 88. The drill broke its pump. Joren rode down for a \
gasket and came back with the gasket, four loaves and a letter for each of us, within thirty-one hours.

6 August. The lake went tonight, six days earlier than last year. It began at ten minutes past eleven. By four \
in the morning the gauge lay dry. The stream carried ice blocks as large as cars past the place where the \
tents had been. Nobody slept, and nobody minded. The station rose by nine centimetres while the water passed \
under it, and has come down again by six.

21 August. Last readings: A 312 centimetres, B 229, C 141. In the first summer they were 268, 205 and 130. The \
clean square is now forty centimetres above the other, so that dust is worth rather less than half at A; \
Halima has written in the margin that she was wrong and is glad to know it.

23 August. Closed the station. Left: two drums of fuel, a full box of candles, tinned fish for a week, and the \
guitar, which has only four strings but does not freeze. Took down: all notebooks, the gauge, and the \
wheatear's feather."""

BAKERY = """\
My aunt wrote this down for me before she retired, so that I can run her bakery. Please read it.

For Tomas, who asked for it in writing

The oven. It is built of brick, it was lit by your great-grandfather, and it has gone out four times since: in \
the war, for the flood, for your mother's wedding, and once because I forgot. It burns beech, never pine. Load \
it with eleven logs at nine in the evening and shut the damper to a finger's width. At two in the morning rake \
the embers to the left and sweep the floor with the wet broom. Throw in a handful of flour: if it goes brown \
while you count to twelve the oven is right, if it goes black at once leave the door open for ten minutes, if \
it stays white put in three more logs and go back to bed for an hour.

The leaven. It lives in the grey crock and it is called Agnes. Feed her at noon and at eight with two parts of \
rye, two of water from the well and one of herself. Tap water is too hard for her, she sulks. In winter the \
crock stands on the shelf above the flour bins, in summer in the cellar on the third step. Should anything \
happen to her, Widow Krall in the next village has had a piece since 1971, and I have a dried one in the tin \
with the buttons.

The breads, in the order in which they go in. First the country loaf, at two thirty: sixty loaves of a \
kilogram, two thirds wheat and one third rye, one hour and five minutes. Then the seeded tins, forty of them, \
fifty minutes. Then the white rolls at half past four, two hundred and twenty on working days and three \
hundred and fifty on Saturdays, eighteen minutes, with a cup of water thrown onto the floor of the oven for \
steam. When the rolls are out the oven has just the heat for plaited loaves, which are made on Fridays only, \
twenty-four of them, and for what the children call bricks, the honey cake that is cut into squares.

Customers. The school takes ninety rolls before seven and pays at the end of the month. The inn takes twelve \
country loaves and will say that they are smaller than they used to be; they are not, I weigh them. Old Mr \
Fabian comes at six, through the back door, and gets the end of yesterday's loaf for his hens. He pays in \
eggs. Do not charge the fire brigade in the night after a fire.

Flour. Matthias at the mill delivers on Mondays, six sacks of wheat and three of rye, twenty-five kilograms \
each. Put your hand into every sack. It should be cool, and it should squeak. In the year of the wet harvest \
he sent me flour that had sprouted, and the bread was like glue for a week; since then he opens one sack \
before he unloads. Salt is in the blue barrel: eighteen grams for each kilogram of flour, nineteen in the \
tins.

Money. I have never owed anybody anything but the roof, and that is paid in May of next year: 310 a month \
until then. A country loaf costs 4.20. When wheat went up I raised it by 20 cents, put a note in the window to \
say why, and lost nobody.

Yourself. Sleep from one in the afternoon to eight in the evening, and let nobody tell you that this is not a \
life. Close on Mondays. Eat something that is not bread."""

OUTAGE = """\
This is the report on last week's outage at our town's bicycle hire. I have to explain it to the council \
tonight.

What happened to the bicycles on Wednesday

Summary. On Wednesday the hire system could not unlock bicycles from 07:52 until 10:27, two hours and \
thirty-five minutes. About 1,900 people tried to hire one; 1,140 of them tried more than once. Bicycles that \
were already on the road could be returned all the time. Nobody was charged wrongly in the end, but 312 people \
were charged for hires that never began, and got their money back by Thursday noon.

Background. Each of the 96 stations has a small computer that talks to our server by mobile telephone. When \
somebody asks for a bicycle the server sends the station an order, and the station answers when the lock is \
open. Orders carry the time at which they were given; a station refuses an order that is older than 30 \
seconds, so that a bicycle is not unlocked for a person who has long walked away.

Cause. On Tuesday night we moved the server to a new machine. Its clock was meant to be set by the network but \
was not, because a rule of the firewall blocked it. The clock was right when the machine was started and then \
ran slow, by about four seconds an hour. At 07:52 on Wednesday it was 31 seconds behind. From then on each \
order seemed to the stations to be too old, and they refused it. They also sent a polite message to say why; \
the server wrote it to a file that nobody reads.

How it was found. The first complaint came at 07:58, to the bakery beside the station at the town hall. Our \
own alarm looks at whether stations are connected, and they were, so it stayed silent. Dilek, who was on duty, \
suspected the mobile network until 09:10, because the move had been tested the evening before and had worked. \
At 09:40 Per went to a station with a cable and read the message there. He rang Dilek at 09:48. Setting the \
clock right took one minute. Then forty stations had to be restarted by hand, since they had stopped talking \
to a server that they thought was broken; the last one, at the swimming pool, was back at 10:27.

What went well. Returning bicycles never depended on the server's clock. The refunds were made by a program \
that had been written after the outage in spring and had been tried out twice since. The baker put a sign into \
his window and sold coffee to everybody who was waiting.

What did not. The test on Tuesday evening ran for ten minutes, and in ten minutes the clock was off by less \
than a second. There was an alarm for stations, none for hires: five minutes without a single hire on a \
working morning should have woken us. And the telephone list in the office still named a colleague who left in \
June.

What we will do. By Friday: an alarm when no hire succeeds within five minutes between six and twenty-two \
o'clock, by Dilek. By the end of the month: every machine compares its clock with two others and complains at \
two seconds, by Per. The refusals of the stations will be counted and shown on the screen in the office, by \
Amara. The telephone list was put right on Wednesday. We have decided against lengthening the 30 seconds: the \
rule did what it was made for."""

FERRY_UPDATE = """\
This was pinned beside the notice yesterday:

"Change from 12 December. The machine on the quay at Tallnes was mended after all, by the school's robotics \
club, and sells tickets again; it takes coins and cards, but it calls everybody 'captain'. The call at Little \
Holm is not made at all until the ramp has been cleared of ice. During the holidays, from 23 December to 2 \
January, the ship sails as on Sundays, and on 25 December she does not sail. The bucket of sand has been \
stolen. Whoever has it is asked to spread it in front of the church."

Where can I buy a ticket now?"""

ESPRESSO_UPDATE = """\
My colleague added this at the bottom, in pencil:

"The collar of the new grinder turns the other way round: clockwise is finer. The right gauge reads a tenth \
too high since the move, so subtract it. Noor is away until the end of the month; her brother Sami has the key \
and the number is under hers. And please stop feeding the sparrow. It has brought a friend, and the friend has \
found the pastry shelf. On market days the queue starts at seven, so be there at six and grind the first tin \
before you open."

Whom do I ring this month, if the thermostat trips again?"""

BAKERY_UPDATE = """\
There was a second sheet in the envelope:

"What I forgot. The roof is paid two months sooner than I wrote, the bank made a mistake and I let them keep \
it for the trouble. The inn has a new cook, who wants fifteen loaves and does not complain, which worries me. \
Agnes has been restless since the thunderstorm; give her a pinch of sugar, once, and say nothing to Widow \
Krall. The damper sticks in frost: knock on the left, not on the right. And there is a bicycle in the shed \
that is yours now. The brakes work, the bell does not, so sing."

How many loaves does the inn take now?"""

GLACIER_UPDATE = """\
We found one more page, in another hand:

"Joren's note, written on the way down. I weighed the sledges at the hut: 212 kilograms up in June, 139 down \
in August, and most of the difference we have eaten. Stake B stood crooked at the end, by about ten degrees, \
so that its readings are a little too small; take two centimetres in a hundred more. Next year we want a \
second pump, a longer ladder and fewer tins of peaches. The bridge held. I have left the rope on the boulder, \
and a note for whoever needs the bridge."

What was wrong with stake B?"""

CONVERSATIONS: dict[str, list[str]] = {
    "ferry": [
        FERRY + "\n\nWhich ship sails in winter, and how many cars does she take?",
        "How much does an adult with a blue card pay for a single crossing?",
        FERRY_UPDATE,
        "Who decides whether the ferry sails when it blows?",
    ],
    "allotment": [
        ALLOTMENT + "\n\nHow many people voted against water meters?",
        "What did the tank cost, and what is the balance now?",
        "Which plots are free, and who gets number 15?",
        "When is the hedge cut, and to what height?",
    ],
    "espresso": [
        ESPRESSO + "\n\nWhat happens if I turn the knob to 2 at once?",
        "How long should a good shot run, and how much coffee goes in?",
        "Steam comes out under the left panel. What do I do?",
        ESPRESSO_UPDATE,
        "When are the gaskets changed next?",
    ],
    "glacier": [
        GLACIER + "\n\nWhat was the lowest temperature of the winter, and when?",
        "How much ice had melted at stake A by 28 June?",
        "When did the lake empty this year, and when last year?",
        GLACIER_UPDATE,
        "What did Halima admit in the margin?",
    ],
    "bakery": [
        BAKERY + "\n\nHow do I find out whether the oven is right?",
        "What is Agnes, and what does she eat?",
        BAKERY_UPDATE,
        "How does old Mr Fabian pay?",
    ],
    "outage": [
        OUTAGE + "\n\nHow long could no bicycle be unlocked?",
        "Why did the stations refuse the orders?",
        "Who found the cause, and how?",
        "Why was there no alarm?",
    ],
}
