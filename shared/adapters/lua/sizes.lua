-- Returns how many entries are waiting, parked, claimed.
return { redis.call('ZCARD', WAITING), redis.call('ZCARD', PARKED), redis.call('ZCARD', CLAIMED) }
