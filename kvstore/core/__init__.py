"""The decision core: `Store.apply(event, now) -> effects`. No clock, file, socket, thread or asyncio in here."""
