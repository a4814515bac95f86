-- ARGV: id, token. The outcome exists, so the entry goes whatever its state, and so does one of
-- a lower token, which a store that went back in time may hold.
local entry = redis.call('HGET', ENTRIES, ARGV[1])
if not entry or token_of(entry) > ARGV[2] then return 0 end
forget(ARGV[1], entry)
return 1
